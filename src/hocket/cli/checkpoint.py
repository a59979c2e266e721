"""`hocket checkpoint`: what `Trainer.save` has written, verified, and exported for plain torch and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hocket.units import format_bytes

from ._output import Json, one_error, print_json

checkpoint = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_Path = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A directory that Trainer.save has written.")]


@checkpoint.command(help="Compare every file with its checksum.")
def verify(path: _Path, as_json: Json = False) -> None:
    """Read a whole checkpoint, and say how large it is, or which file is damaged."""
    from hocket.parallel.state import verify_checkpoint

    with one_error("checkpoint verify"):
        files = verify_checkpoint(path)
    if as_json:
        print_json({"files": {name: {"bytes": nbytes, "crc32": crc} for name, (nbytes, crc) in files.items()}})
        return
    total = format_bytes(sum(nbytes for nbytes, _ in files.values()))
    typer.echo(f"{path} is whole: {len(files)} files of {total} have the checksums with which they were written")


@checkpoint.command(help="Write the weights as safetensors, which plain torch and transformers load.")
def export(
    path: _Path,
    folder: Annotated[Path, typer.Argument(help="Where model.safetensors comes, or several files and their index.")],
    max_shard_size: Annotated[str, typer.Option(help="How large a file may be.")] = "5GB",
) -> None:
    """Write one tensor at a time; takes neither ranks nor the program that trained the model."""
    from hocket.parallel.state import export_checkpoint
    from hocket.units import parse_bytes

    with one_error("checkpoint export"):
        files = export_checkpoint(path, folder, parse_bytes(max_shard_size))
    typer.echo(f"{folder} has {', '.join(files)}")
