"""What is worth knowing of a plan that fits."""

from math import ceil

from clover_local.memory.parts import LEAST_CONTEXT, Plan
from clover_local.memory.sizes import shown, shown_mib
from clover_local.memory.working_set import preview_experts


def advice(made: Plan) -> tuple[str, ...]:
    """Sentences on what slows this plan down and what would help."""
    needed = ceil(preview_experts(made.model.config))
    slots = min(made.slots_per_layer)
    staged = made.staged_bytes - made.disk_bytes
    found = []
    if slots < needed:
        shorter = "a smaller --context or " if made.budget.context > LEAST_CONTEXT else ""
        found.append(
            f"a layer has {slots} slots and a pass over a block uses about {needed} experts, so "
            f"each pass fetches some of them again: {shorter}a larger card helps"
        )
    if staged:
        cause = "host memory" if made.budget.pin_limit is None else "--pin-limit"
        found.append(
            f"{shown(staged)} of experts are not pinned, for lack of {cause}: their copies take "
            "about twice as long"
        )
    if made.disk_bytes:
        more = shown_mib(made.budget.host + made.disk_bytes)
        found.append(
            f"{shown(made.disk_bytes)} of experts fit into no memory and come from the disk: "
            f"{more} of free host memory would hold them"
        )
    return tuple(found)
