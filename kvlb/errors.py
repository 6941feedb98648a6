"""Errors of the command: a sentence for the person at the terminal, exit code 2.

KvlbError
├── SettingsError       an option, a file or an environment variable has to change
│   └── NoEnginesError  nothing to balance over
├── CaptureError        a capture of `kvlb audit` can't be read
├── PeerError           something we talk to did not answer as it should
├── BrokenError         the process can't go on; its log says why
├── WorkersError        the workers of a balancer don't start; they have said why
└── MissingExtraError   an optional package isn't installed
"""


class KvlbError(Exception):
    """Base of all errors the command reports without a traceback. The message says what to do."""


class SettingsError(KvlbError):
    """An option, a configuration key or an environment variable has to change."""


class NoEnginesError(SettingsError):
    """There is no engine to balance over."""


class PeerError(KvlbError):
    """A balancer or an engine did not answer as it should."""


class BrokenError(KvlbError):
    """A part of this process ended that it can't do without."""


class WorkersError(KvlbError):
    """The workers of a balancer don't start. They have said why."""

    def __init__(self) -> None:
        super().__init__("the workers don't start; what they say is above")


class MissingExtraError(KvlbError):
    """An optional package isn't installed."""
