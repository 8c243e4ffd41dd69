"""Quantities that methods read, one file each; see ``base.Signal``.

Importing this package registers those of its files; a plug-in registers more when imported.
"""

from importlib import import_module
from pkgutil import iter_modules

from megatron_rl.signals.base import Columns, Signal, SignalSetup, StepView
from megatron_rl.signals.registry import Signals, register_signal, signals_of

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Columns",
    "Signal",
    "SignalSetup",
    "Signals",
    "StepView",
    "register_signal",
    "signals_of",
]
