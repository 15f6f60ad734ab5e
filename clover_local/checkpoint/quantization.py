"""The `quantization_config` of config.json, made from what the weight files really hold.

In the words of compressed-tensors, so that other programs can load the files; this runtime reads
bits and group sizes from the shapes and needs none of it. Matrices are named by patterns, one for
each kind that is packed alike in all layers: 92,160 names would fill megabytes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from clover_local.checkpoint.packed import PackedFormat, PackedInfo
from clover_local.checkpoint.placements import QUANT_FORMAT, QUANT_METHOD, Checkpoint, Placement

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Place = tuple[int, ...]  # layer, expert


@dataclass(frozen=True)
class _Scheme:
    """What a config group has in common. Experts have their own, as transformers expects it."""

    layout: PackedFormat
    experts: bool


def quantization_config(checkpoint: Checkpoint) -> dict[str, object] | None:
    """The object for config.json; None where nothing is packed.

    The scale's dtype makes no group of its own: readers take it from the tensors.
    """
    kinds: dict[str, dict[_Scheme | None, set[Place]]] = {}
    for placement in checkpoint.placements:
        if len(placement.target.shape) == 2 and not placement.target.kind.convolution:
            module = placement.tensor.name.removeprefix(checkpoint.prefix).removesuffix(".weight")
            place = tuple(int(number) for number in _NUMBER.findall(module))
            schemes = kinds.setdefault(_NUMBER.sub("#", module), {})
            schemes.setdefault(_scheme(placement), set()).add(place)
    groups: dict[_Scheme, list[str]] = {}
    ignore: list[str] = []
    for kind, schemes in kinds.items():
        for scheme, places in schemes.items():
            patterns = ignore if scheme is None else groups.setdefault(scheme, [])
            patterns += _patterns(kind, places, everywhere=set().union(*schemes.values()))
    if not groups:
        return None
    return {
        "quant_method": QUANT_METHOD,
        "format": QUANT_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": _group(scheme, sorted(patterns))
            for number, (scheme, patterns) in enumerate(
                sorted(groups.items(), key=lambda item: _order(item[0]))
            )
        },
        "ignore": sorted(ignore),
    }


def _scheme(placement: Placement) -> _Scheme | None:
    tensor = placement.tensor
    if not isinstance(tensor, PackedInfo):
        return None
    layout = replace(tensor.format, scale_dtype="")
    return _Scheme(layout, experts=placement.target.expert is not None)


def _order(scheme: _Scheme) -> tuple[bool, int, int, bool]:
    layout = scheme.layout
    return not scheme.experts, layout.bits, layout.group_size, not layout.symmetric


def _group(scheme: _Scheme, targets: list[str]) -> dict[str, object]:
    layout = scheme.layout
    return {
        "targets": targets,
        "weights": {
            "num_bits": layout.bits,
            "type": "int",
            "symmetric": layout.symmetric,
            "strategy": "group",
            "group_size": layout.group_size,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
        "format": QUANT_FORMAT,
    }


def _patterns(kind: str, places: set[Place], *, everywhere: set[Place]) -> Iterator[str]:
    """Names of `kind` (`#` for numbers) at `places`, with as few patterns as layers allow."""
    if places == everywhere:
        yield _pattern(kind, *([r"\d+"] * kind.count("#")))
    else:
        whole, partial = _by_layer(places, everywhere)
        if whole:
            rest = [r"\d+"] * (kind.count("#") - 1)
            yield _pattern(kind, _either(whole), *rest)
        for layer, experts in partial.items():
            yield _pattern(kind, str(layer), _either(experts))


def _by_layer(
    places: set[Place], everywhere: set[Place]
) -> tuple[list[int], Mapping[int, list[int]]]:
    """The layers that lie in `places` whole, and the experts of the others."""
    whole, partial = [], {}
    for layer in sorted({place[0] for place in places}):
        ours = sorted(place for place in places if place[0] == layer)
        if len(ours) == sum(place[0] == layer for place in everywhere):
            whole.append(layer)
        else:
            partial[layer] = [place[1] for place in ours]
    return whole, partial


def _pattern(kind: str, *numbers: str) -> str:
    pieces = [re.escape(piece) for piece in kind.split("#")]
    return (
        "re:.*"
        + pieces[0]
        + "".join(number + piece for number, piece in zip(numbers, pieces[1:], strict=True))
        + "$"
    )


def _either(numbers: list[int]) -> str:
    return f"({'|'.join(map(str, numbers))})"
