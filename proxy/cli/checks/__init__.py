"""What ``legato doctor`` looks at. A check changes nothing that outlives it."""

from .base import Check
from .here import check_here, serves
from .log import check_log
from .upstream import check_upstream

__all__ = ["Check", "check_here", "check_log", "check_upstream", "serves"]
