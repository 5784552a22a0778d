"""What a user can get wrong on the command line: each time one line that says what, why and what to do."""

import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "nan"], "temperature must be a finite number"),
        (["--temperature=-1"], "temperature must be in"),
        (["--max-tokens", "0"], "max_tokens must be 1 or more"),
        (["--top-p", "0"], "top_p must be in (0, 1]"),
        (["--stop", ""], "a stop string must not be empty"),
        (["--n", "3", "--best-of", "2"], "best_of must be n (3)"),
        (["--threads", "0"], "threads must be a number, 1 to 1,024; got 0"),
        (["--max-context=-5"], "max_context must be a number, 1 or more; got -5"),
        (["--kv-memory-gib", "nan"], "kv_memory_gib must be a number, 0 or more; got nan"),
        (["--kv-memory-gib", "inf"], "kv_memory_gib must be a number, 0 or more; got inf"),
        (["--dtype", "float8"], "dtype must be auto, float64, float32, float16 or bfloat16; got 'float8'"),
        (["--device", "tpu"], "device must be auto, cpu or cuda; got 'tpu'"),
        (["--batch-invariant", "--device", "cpu"], "batch_invariant needs a GPU; on a CPU, omit it"),
        (["--speculate", "ngrma"], "there is nothing at 'ngrma'; did you mean ngram?"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_loaded(
    cumulo: Run, arguments: list[str], words: str
) -> None:
    ran = cumulo("generate", "hello", *arguments)
    assert ran.code == 2
    assert words in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--slo-late", "maybe"], "--slo-late must be refuse or queue, got 'maybe'"),
        (["serve", "--plan", "none.yaml"], "cannot read the plan none.yaml: No such file or directory"),
        (
            ["collective", "tune", "all_reduce", "--size", "1MX"],
            "--size must look like 512, 64KiB, 1GiB or 2.5GB",
        ),
        (["collective", "show", "all_reduce", "rign"], "no all_reduce algorithm 'rign'; did you mean ring?"),
        (
            ["serve", "--rank-of", "127.0.0.1:9", "--tp", "2", "--max-running", "4", "--threads", "1"],
            "a rank takes --max-running, --tp from its engine: give them to the server that waits at 127.0.0.1:9;",
        ),
        (["launch", "none.yaml"], "cannot read the job file none.yaml: No such file or directory"),
    ],
)
def test_what_newer_verbs_cannot_do_is_told_in_one_line(
    cumulo: Run, arguments: list[str], words: str
) -> None:
    ran = cumulo(*arguments)
    assert (ran.code, len(ran.err.splitlines())) == (2, 1) and words in ran.err


def test_no_prompt_and_two_prompts_are_refused(cumulo: Run) -> None:
    assert "none was given" in cumulo("generate").err
    assert "two were given" in cumulo("generate", "hello", "--file", "prompts.txt").err


def test_a_missing_prompt_file_is_named(cumulo: Run, tmp_path: Path) -> None:
    ran = cumulo("generate", "--file", str(tmp_path / "none.txt"))
    assert ran.code == 2
    assert "none.txt" in ran.err
    assert "No such file" in ran.err


def test_a_pipe_without_a_question_says_how_to_ask_one(cumulo: Run) -> None:
    ran = cumulo("chat", stdin="  \n")
    assert ran.code == 2
    assert "standard input contains no question" in ran.err


@pytest.mark.parametrize("verb", [["chat"], ["generate", "-"]])
def test_input_that_is_not_utf8_is_refused_with_its_place(cumulo: Run, verb: list[str]) -> None:
    ran = cumulo(*verb, stdin=b"What is \xff?")
    assert ran.code == 2
    assert "not UTF-8 text: byte 0xff at offset 8" in ran.err


@pytest.mark.parametrize("verb", [["chat"], ["generate", "hello", "--model"], ["bench", "engine"]])
def test_a_model_that_is_not_there_is_named(cumulo: Run, verb: list[str]) -> None:
    ran = cumulo(*verb, "nowhere/model.gguf", stdin="hello")
    assert ran.code == 2
    assert "nowhere/model.gguf" in ran.err
    assert "Traceback" not in ran.err


def test_a_damaged_model_is_refused(cumulo: Run, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00 and then nothing sensible")
    ran = cumulo("generate", "hello", "--model", str(broken))
    assert ran.code == 2
    assert "broken.gguf" in ran.err


def test_a_server_that_is_not_there_is_said_in_words(cumulo: Run) -> None:
    with socket.socket() as unheard:  # bound, and nobody listens
        unheard.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        ran = cumulo("explain", "chatcmpl-1", "--server", address)
    assert ran.code == 2
    assert f"no Cumulo server answers at {address}" in ran.err and "--server" in ran.err
    assert "refused" in ran.err and "<" not in ran.err


@pytest.mark.parametrize("address", ["nonsense.invalid", "http://[", "http://127.0.0.1:port"])
def test_what_is_no_address_of_a_server_is_said_in_words(cumulo: Run, address: str) -> None:
    ran = cumulo("explain", "last", "--server", address)
    assert ran.code == 2
    assert f"no Cumulo server answers at {address}" in ran.err and "Traceback" not in ran.err


def test_an_unknown_rival_is_refused(cumulo: Run) -> None:
    ran = cumulo("bench", "engine", "--against", "transformers,abacus")
    assert ran.code == 2
    assert "'abacus'" in ran.err


def test_a_report_that_cannot_be_written_is_an_error(cumulo: Run, tmp_path: Path) -> None:
    ran = cumulo("doctor", "--quick", "--json", str(tmp_path / "no" / "such" / "folder.json"))
    assert ran.code == 2
    assert "cannot write the report" in ran.err
