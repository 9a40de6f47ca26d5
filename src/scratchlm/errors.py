"""The one error class of our own."""


class ScratchLMError(Exception):
    """Something a user can cause and repair; its message is one line, fit for a terminal."""
