"""`clover-local imatrix`: how much each input of each matrix counts, for better quantization."""

from pathlib import Path
from typing import Annotated

import typer

from clover_local.cli import console
from clover_local.cli.options import JsonOpt, ModelArg, QuietOpt, configured
from clover_local.cli.status import size
from clover_local.quant.profiles import Choices

OutArg = Annotated[
    Path, typer.Argument(metavar="OUT.gguf", help="The file to write.", show_default=False)
]
CalibrationOpt = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Text to run; default: the bundled texts.")
]
TokensOpt = Annotated[
    int, typer.Option(min=2, metavar="N", help="Tokens of it, as far as there are so many.")
]
PreviewWeightOpt = Annotated[
    float,
    typer.Option(min=0, metavar="W", help="What a preview's row counts for; a commit's row is 1."),
]
SeedOpt = Annotated[int, typer.Option(metavar="N", help="Seed of the choice of text and masks.")]
DeviceOpt = Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to run, in float32.")]

DEFAULT_TOKENS = 16_384


@configured("device")
def imatrix(
    call: typer.Context,
    model: ModelArg,
    out: OutArg,
    calibration: CalibrationOpt = None,
    calibration_tokens: TokensOpt = DEFAULT_TOKENS,
    preview_weight: PreviewWeightOpt = Choices.preview_weight,
    seed: SeedOpt = Choices.seed,
    device: DeviceOpt = "cpu",
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Write MODEL's importance matrix, for `export gguf --imatrix` or llama-quantize."""
    from clover_local.gguf.container import require_target
    from clover_local.gguf.imatrix import TYPE, imatrix_bytes
    from clover_local.quant.documents import read_documents
    from clover_local.session import check_device, open_model

    check_device(device)
    require_target(out, TYPE)
    opened = open_model(model)
    documents = read_documents(calibration, opened.tokenizer)

    from clover_local.checkpoint.write import write_file
    from clover_local.quant.calibration import LENGTH, make_sequences
    from clover_local.quant.imatrix import collect, unseen_experts

    sequences = make_sequences(
        documents,
        tokenizer=opened.tokenizer,
        config=opened.config,
        tokens=calibration_tokens,
        seed=seed,
    )
    if not opened.checkpoint.has_diffusion:
        console.note("note: no diffusion parameters, so causal rows alone count")
        sequences = tuple(sequence.without_previews() for sequence in sequences)
    with console.progress(f"running {model}") as on_progress:
        sums = collect(
            opened,
            sequences,
            preview_weight=preview_weight,
            device=device,
            on_progress=on_progress,
        )
    dataset = "clover-local" if calibration is None else calibration.name
    content = imatrix_bytes(sums, dataset=dataset, chunks=len(sequences), chunk_size=LENGTH)
    write_file(out, content)
    rows, unseen = sum(sequence.rows for sequence in sequences), unseen_experts(sums)
    if as_json:
        made = {"file": str(out), "bytes": len(content), "tensors": len(sums)}
        console.print_json({**made, "rows": rows, "unseen_experts": unseen})
        return
    missed = f"; {unseen} experts saw none and count alike everywhere" if unseen else ""
    console.text(f"{out}: {len(sums)} tensors from {rows} rows, {size(len(content))}{missed}")
