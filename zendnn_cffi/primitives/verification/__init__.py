"""Is every implementation of the library right? A reference, checks against it, and what they found.

reference, reference_post_ops   what a primitive should compute, in float64
noise, layouts, places          operands, how they lie, and memory in which reading or writing beyond shows
check                           one primitive against its reference
kinds                           what one check speaks for, as a line of text
records                         the results of `make verify-library`, data in zendnn_cffi/verified/
first_use                       the check of what those results do not cover, once per machine
cases, run                      `make verify-library`: every implementation in every kind of use
"""
