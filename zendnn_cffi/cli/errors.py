"""What a command says, in one line, where it cannot do what it was asked for."""


class CommandError(Exception):
    """One line: what is wrong, and what to do."""
