"""Steps that put a ZenDNN engine library into the package; driven by ../CMakeLists.txt through ../engine.py.

    pins -> fetch -> prebuilt (standalone, elf_strip) | source | system | absent -> config.json
                  -> blis_sdist (an extra libblis.so beside any of them)

Nothing here is installed. Only `standalone` needs a package outside the standard library (LIEF), imported when used.
"""
