"""One rule per primitive, one file per family; importing this package fills the table."""

from . import contraction, effects, elementwise, indexing, linalg, parallel, random, reduction, shape, stacked
from .contract import Block, Decision, Local, Rule, Site, register_rule, replicate, rule_for

__all__ = [
    "Block",
    "Decision",
    "Local",
    "Rule",
    "Site",
    "contraction",
    "effects",
    "elementwise",
    "indexing",
    "linalg",
    "parallel",
    "random",
    "reduction",
    "register_rule",
    "replicate",
    "rule_for",
    "shape",
    "stacked",
]
