"""The errors a command line prints as one line, and the exit codes that go with them."""


class UserError(Exception):
    """Something the user wrote is wrong. The message names the field and the fix; nothing was changed."""

    exit_code = 2


class InfraError(Exception):
    """A machine, network, disk or tool let us down; what was measured so far is on disk."""

    exit_code = 3
