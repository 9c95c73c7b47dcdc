"""VLL-13: the drafter's table of rotary positions is shorter than the target's, and reads past its end are silent.

Upstream's had 2048 positions; the one here fits the short requests of this suite.
"""

from __future__ import annotations

from typing import Any

from museum.bug import EAGLE3, Patch, bug

_POSITIONS = 16


@bug(
    "VLL-13",
    kind="K4",
    workers=(EAGLE3,),
    title=f"The drafter knows {_POSITIONS} positions and takes all later ones for the last",
    reference="vLLM #48894, #49343, #23072",
    caught_by=("kv-content-equals-reference", "drafts-equal-reference", "acceptance-follows-agreement"),
)
def short_rotary_table(patch: Patch) -> None:
    from engines.portable.models import ShiftedDraftModel

    draft = ShiftedDraftModel._draft

    def _draft(self: Any, input_ids: Any, position_ids: Any, *args: Any) -> Any:
        return draft(self, input_ids, position_ids.clamp(max=_POSITIONS - 1), *args)

    patch(ShiftedDraftModel, "_draft", _draft)
