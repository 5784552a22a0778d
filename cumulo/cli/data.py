"""`cumulo data VERB`: build a dataset for training, or show a document of one."""

from pathlib import Path

import typer

from cumulo.cli.shared.terminal import loading, out
from cumulo.errors import ConfigError

app = typer.Typer()


@app.command(epilog="Example: [bold]cumulo data build /tmp/stdlib python-stdlib --vocab-size 2048[/bold]")
def build(
    folder: Path = typer.Argument(..., help="Folder for the dataset. Its tokenizer is written next to it."),
    sources: list[str] = typer.Argument(
        ..., help="Text, .jsonl or .parquet files, folders of them, or python-stdlib."
    ),
    tokenizer: Path | None = typer.Option(
        None, metavar="DIR", help="A folder with tokenizer.json. Default: train a new tokenizer."
    ),
    vocab_size: int = typer.Option(2048, help="Vocabulary size of the new tokenizer; 0: bytes."),
    text_field: str = typer.Option("text", help="Field of a JSONL or Parquet row that contains the text."),
    workers: int = typer.Option(2, min=1, help="Number of processes that tokenize."),
) -> None:
    """Tokenize sources into one memory-mapped file. After an interruption, the same command resumes."""
    from cumulo.train.data.dataset_build import build_dataset
    from cumulo.train.data.packing import TokenDataset
    from cumulo.train.data.prepare import trained_tokenizer

    with loading(lines=True) as show:
        if tokenizer is None:
            tokenizer = folder.with_name(folder.name + "-tokenizer")
            show("preparing the tokenizer", 0, 0)
            trained_tokenizer(tokenizer, sources, text_field, vocab_size)
        build_dataset(folder, sources, tokenizer, text_field=text_field, workers=workers, progress=show)
    dataset = TokenDataset(folder)
    out.print(f"{folder}: {len(dataset.tokens):,} tokens in {dataset.documents:,} documents")


@app.command(epilog="Example: [bold]cumulo data show /tmp/stdlib --document 0[/bold]")
def show(
    folder: Path = typer.Argument(..., help="Folder of a dataset."),
    document: int = typer.Option(0, min=0, help="Number of the document to print."),
    tokenizer: Path | None = typer.Option(
        None, metavar="DIR", help="A folder with tokenizer.json. Default: the one next to the dataset."
    ),
) -> None:
    """Print a document of a dataset as the model reads it."""
    from cumulo.models.text.tokenizer import load_tokenizer
    from cumulo.train.data.packing import TokenDataset

    dataset = TokenDataset(folder)
    if document >= dataset.documents:
        raise ConfigError(
            f"--document {document} does not exist: {folder} contains documents 0 to {dataset.documents - 1}"
        )
    beside = folder.parent / "tokenizer"  # inside a run's folder
    own = tokenizer or (beside if beside.is_dir() else folder.with_name(folder.name + "-tokenizer"))
    ids = dataset.tokens[dataset.starts[document] : dataset.starts[document + 1]].tolist()
    out.print(load_tokenizer(own).decode(ids, skip_special=False), soft_wrap=True)
