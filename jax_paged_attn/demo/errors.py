"""The error that the demo shows as one line, without a traceback."""


class DemoError(Exception):
    """Something the user can put right: a bad file, a missing package, a prompt that is too long."""
