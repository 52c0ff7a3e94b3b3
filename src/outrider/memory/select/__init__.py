"""Which KV entries attention reads: selectors, one file each, and the rules that all of them share."""

from outrider.memory.look import Gain, Look
from outrider.memory.select.base import Preference, Selector, View, check_budget, group_layers, spread_taps
from outrider.memory.select.choose import Chooser
from outrider.memory.select.head import HeadSelector
from outrider.memory.select.head_memory import HeadMemory
from outrider.memory.select.oracle import OracleSelector, captured_mass
from outrider.memory.select.pages import PageSelector, PageSummaries
from outrider.memory.select.policy import ReadPolicy, make_policy
from outrider.memory.select.reader import ContextReader, make_reader
from outrider.memory.select.sticky import Fresh, Sticky
from outrider.memory.select.window import WindowSelector
from outrider.models.cache import float_rows

__all__ = [
    "Chooser",
    "ContextReader",
    "Fresh",
    "Gain",
    "HeadMemory",
    "HeadSelector",
    "Look",
    "OracleSelector",
    "PageSelector",
    "PageSummaries",
    "Preference",
    "ReadPolicy",
    "Selector",
    "Sticky",
    "View",
    "WindowSelector",
    "captured_mass",
    "check_budget",
    "float_rows",
    "group_layers",
    "make_policy",
    "make_reader",
    "spread_taps",
]
