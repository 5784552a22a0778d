"""`cumulo data VERB`: build a dataset for training, or look into one."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Datasets for training: memory-mapped token ids.", no_args_is_help=True, rich_markup_mode="rich"
)


@app.command(epilog="Example: [bold]cumulo data build /tmp/stdlib python-stdlib --vocab-size 2048[/bold]")
def build(
    folder: Annotated[Path, typer.Argument(help="Where the dataset goes; its tokenizer goes beside it.")],
    sources: Annotated[
        list[str], typer.Argument(help="Text, .jsonl or .parquet files, folders, or python-stdlib.")
    ],
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with tokenizer.json; left out: one is trained.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Of the trained tokenizer; 0: plain bytes.")] = 2048,
    text_field: Annotated[str, typer.Option(help="Of a JSONL or Parquet row.")] = "text",
    workers: Annotated[int, typer.Option(min=1, help="Processes that tokenise.")] = 2,
) -> None:
    """Tokenise sources into one file. Interrupted, the same command goes on where it was."""
    from cumulo.cli.terminal import loading, out
    from cumulo.train.dataset_build import build_dataset
    from cumulo.train.prepare import trained_tokenizer
    from cumulo.train.token_file import TokenDataset

    with loading(lines=True) as show:
        if tokenizer is None:
            tokenizer = folder.with_name(folder.name + "-tokenizer")
            show("preparing the tokenizer", 0, 0)
            trained_tokenizer(tokenizer, sources, text_field, vocab_size)
        build_dataset(folder, sources, tokenizer, text_field=text_field, workers=workers, progress=show)
    dataset = TokenDataset(folder)
    out.print(f"{folder}: {len(dataset.tokens):,} tokens in {dataset.documents:,} documents", markup=False)


@app.command(epilog="Example: [bold]cumulo data show /tmp/stdlib --document 0[/bold]")
def show(
    folder: Annotated[Path, typer.Argument(help="A built dataset.")],
    document: Annotated[int, typer.Option(min=0, help="Which document to print.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with tokenizer.json; left out: the one built beside it.")
    ] = None,
) -> None:
    """Print a document as the model will read it."""
    from cumulo.cli.terminal import out
    from cumulo.errors import ConfigError
    from cumulo.models.tokenizer import load_tokenizer
    from cumulo.train.token_file import TokenDataset

    dataset = TokenDataset(folder)
    if document >= dataset.documents:
        raise ConfigError(f"{folder} has documents 0 to {dataset.documents - 1}, there is no {document}")
    beside = folder.parent / "tokenizer"  # inside a run's folder
    own = tokenizer or (beside if beside.is_dir() else folder.with_name(folder.name + "-tokenizer"))
    ids = dataset.tokens[dataset.starts[document] : dataset.starts[document + 1]].tolist()
    out.print(load_tokenizer(own).decode(ids, skip_special=False), markup=False, soft_wrap=True)
