"""Write a rule for a primitive that shardstep does not know: see `docs/writing-a-rule.md`."""

from ._src.core.layout import PARTIAL, REPLICATED, Array, Partial, Placement, Replicated, Split, Varying
from ._src.rules.contract import Block, Decision, Local, Rule, Site, register_rule, replicate

__all__ = [
    "PARTIAL",
    "REPLICATED",
    "Array",
    "Block",
    "Decision",
    "Local",
    "Partial",
    "Placement",
    "Replicated",
    "Rule",
    "Site",
    "Split",
    "Varying",
    "register_rule",
    "replicate",
]
