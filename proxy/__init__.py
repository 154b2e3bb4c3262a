"""legato: many upstream cycles, one unbroken stream.

The rooms: ``core`` decides and has no I/O; ``log``, ``upstream``, ``runner``, ``tasks`` and ``web`` do
what it orders and decide nothing.
"""

__version__ = "0.1.0"
