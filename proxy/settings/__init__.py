"""Every setting of legato, and the only place that reads the environment and the TOML file.

A setting called ``max_cycles`` is the flag ``--max-cycles``, the variable ``LEGATO_MAX_CYCLES`` and the
TOML key ``max_cycles``. ``load`` lays the sources over each other; ``Settings(...)`` by itself reads
nothing. The descriptions in ``model`` are what ``--help`` and the settings table of the docs show.
"""

from .describe import Setting, describe, shown
from .load import SettingsError, load
from .model import Settings, Source

__all__ = ["Setting", "Settings", "SettingsError", "Source", "describe", "load", "shown"]
