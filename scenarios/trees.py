"""How many nodes a tree of drafts may have."""

from __future__ import annotations

from scenarios.errors import outside, require
from scenarios.model import Config


def most_nodes(depth: int, topk: int) -> int:
    """Nodes that the layers of a draft tree make: ``topk`` from the root, then ``topk`` for each of ``topk``."""
    return topk + topk * topk * (depth - 1) if topk else 0


def check_tree(config: Config) -> None:
    """Raise ``ScenarioError`` unless the tree's numbers fit the worker and each other.

    A tree keeps its best path, so it has a node for each depth and no more than were made.
    """
    depth, topk, nodes = config.max_draft_len, config.dynamic_tree_max_topK, config.max_total_draft_tokens
    if not config.traits.tree:
        for name in ("dynamic_tree_max_topK", "max_total_draft_tokens"):
            require(not getattr(config, name), f"config.{name}", f"{config.worker} drafts no tree", "leave it out")
        return
    missing = f"is missing, and {config.worker} drafts a tree"
    too_small = f"{topk} is too small for a tree" if topk else missing
    require(topk >= 2, "config.dynamic_tree_max_topK", too_small, "write 2 or more")
    most = most_nodes(depth, topk)
    require(
        depth <= nodes <= most,
        "config.max_total_draft_tokens",
        f"{nodes} is {outside(depth, most)}" if nodes else missing,
        "a tree of this max_draft_len and dynamic_tree_max_topK needs a value in that range",
    )
