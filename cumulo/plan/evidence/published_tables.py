"""Tables of training results in their publishers' own columns, made into lines of `published_training.csv`.
`cumulo plan validate --tables FOLDER` reads further rows with it, and the shipped transcription was made with it.

What a table does not print and how it was filled in is said beside each reader, and for people in
`published_training_sources.yaml`.
"""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from cumulo.errors import ConfigError
from cumulo.plan.evidence.published_lines import (
    FULL_MFU,
    GPT,
    HARDWARE,
    LLAMA,
    MODEL_FLOPS,
    MODELS,
    NEMOTRON,
    SECONDS,
    TOKENS,
    Given,
    Line,
    line_of,
    read_nemo,
    shape_of,
)


def lines_of(folder: Path, refused: list[str] | None = None) -> list[Line]:
    """Rows of the tables in a folder that state what a prediction needs; `refused` takes why others cannot be."""
    found: list[Line] = []
    names: dict[str, int] = {}
    for path in sorted(folder.glob("*.csv")):
        reader = next((read for start, read in READERS.items() if path.name.startswith(start)), None)
        if reader is None:
            continue
        with path.open(encoding="utf-8", newline="") as file:
            for number, given in enumerate(csv.DictReader(file), start=2):
                try:
                    lines = list(reader(given))
                except (ConfigError, KeyError, ValueError) as error:
                    if refused is None:
                        raise ConfigError(f"{path.name}, line {number}: {error}") from error
                    refused.append(f"{path.name}, line {number}: {error}")
                    continue
                for line in lines:
                    names[line["id"]] = names.get(line["id"], 0) + 1
                    if names[line["id"]] > 1:  # measured twice with another micro-batch
                        line["id"] += f"-mb{line['micro_batch']}"
                    found.append(line)
    if not found:
        raise ConfigError(
            f"{folder} contains no known table; names of known files begin with: {', '.join(READERS)}"
        )
    return found


def _gpt(given: Given, vocabulary: int, sequence: int) -> dict[str, object]:
    hidden = int(given["hidden"])
    return {
        **shape_of(int(given["layers"]), hidden, int(given["heads"]), int(given["heads"]), 4 * hidden, GPT),
        "vocabulary": vocabulary,
        "sequence": sequence,
    }


def _narayanan(given: Given) -> Iterator[Line]:
    """Table 1 interleaves where it says so; table 2 compares with ZeRO-3 and prints no interleaving."""
    tp, pp, gpus = int(given["tp"]), int(given["pp"]), int(given["gpus"])
    scheme = given.get("scheme")
    zero3 = scheme == "ZeRO-3"
    virtual = given.get("layers_per_virtual_stage")
    name = (
        f"t2-{'zero3' if zero3 else 'ptdp'}-{float(given['params_b']):.0f}b-{gpus}"
        if scheme
        else f"t1-{given['model']}"
    )
    yield line_of(
        id=f"narayanan2021-{name}",
        source=f"narayanan2021-table{2 if scheme else 1}",
        software="deepspeed-2021" if zero3 else "megatron-2021",
        node="dgx-a100",
        gpus=gpus,
        **_gpt(given, 51200, 2048),
        dp=gpus // tp // pp,
        tp=tp,
        pp=pp,
        zero=3 if zero3 else 0,
        chunks_per_stage=int(given["layers"]) // pp // int(virtual) if virtual else "",
        micro_batch=given["micro_batch"],
        global_batch=given["global_batch"],
        recompute="full",
        dtype="float16",
        gradient_dtype="float16" if zero3 else "float32",
        flash=0,
        reported=given["tflops_per_gpu"],
        unit=HARDWARE,
    )


def _korthikanti(given: Given) -> Iterator[Line]:
    interleaved = int(given["interleave_stages"])
    for column, recompute in (
        ("iter_time_full_recompute_s", "full"),
        ("iter_time_selective_plus_sp_s", "selective"),
    ):
        if given[column]:
            yield line_of(
                id=f"korthikanti2022-{given['model']}-dp{given['dp']}-{recompute}",
                source="korthikanti2022",
                software="megatron-2021",
                node="dgx-a100",
                gpus=given["gpus"],
                **_gpt(given, 51200, 2048),
                dp=given["dp"],
                tp=given["tp"],
                pp=given["pp"],
                sequence_parallel=int(recompute == "selective"),
                chunks_per_stage=interleaved if interleaved > 1 else "",
                micro_batch=given["micro_batch"],
                global_batch=given["global_batch"],
                recompute=recompute,
                dtype="float16",
                flash=0,
                reported=given[column],
                unit=SECONDS,
            )


def _megatron_core(given: Given) -> Iterator[Line]:
    """Micro-batches and interleaving are not printed: one micro-batch for each rank without a pipeline, else single
    sequences over two chunks for each stage."""
    tp, pp, dp = int(given["tp"]), int(given["pp"]), int(given["dp"])
    yield line_of(
        id=f"megatron-core-r0.8-{given['model']}",
        source="megatron-core-r0.8",
        software="megatron-core-2024",
        node="dgx-h100",
        gpus=given["gpus"],
        **_gpt(given, 131072, 4096),
        dp=dp,
        tp=tp,
        pp=pp,
        zero=1,
        sequence_parallel=int(tp > 1),
        chunks_per_stage=2 if pp > 1 else "",
        micro_batch=1 if pp > 1 else int(given["global_batch"]) // dp,
        global_batch=given["global_batch"],
        overlap_tensor=int(tp > 1),
        reported=given["tflops_per_gpu"],
        unit=MODEL_FLOPS,
    )


def _torchtitan(given: Given) -> Iterator[Line]:
    """As many micro-batches as stages, which is torchtitan's default; with a pipeline, weights stay gathered."""
    technique, h200 = given["technique"].lower(), "H200" in given["gpu"]
    size = given["model"].split("-")[1]
    compiled = "-compile" if "compile" in technique else ""
    rowwise = "-rowwise" if "rowwise" in technique else ""
    tp, pp, kilo = int(given["tp"]), int(given["pp"]), int(given["seq_len"]) // 1024
    interleaved = given["pp_schedule"] == "Interleaved1F1B"
    label = technique.replace("(fp8 all-gather)", "").replace(" ", "-")
    yield line_of(
        id=f"torchtitan-{given['table'].split('-')[0].lower()}-{size.lower()}-{given['gpus']}-{label}-{kilo}k"
        + ("-interleaved" if interleaved else ""),
        source="torchtitan-h200-2025"
        if h200
        else f"torchtitan-{'asynctp-2025' if 'async' in given['table'] else '2024'}",
        software=f"torchtitan-2024{compiled}{rowwise}",
        node="dgx-h200" if h200 else "h100-96gb-500w",
        gpus=given["gpus"],
        **MODELS[f"LLAMA3-{size.upper()}"],
        sequence=given["seq_len"],
        dp=given["fsdp"],
        tp=tp,
        pp=pp,
        cp=given["cp"],
        zero=2 if pp > 1 else 3,
        sequence_parallel=int(tp > 1),
        chunks_per_stage=2 if interleaved else "",
        micro_batch=int(given["local_batch"]) // pp,
        global_batch=given["global_batch"],
        recompute="full" if given["activation_ckpt"] == "full" else "selective",
        dtype="float8" if "float8" in technique else "bfloat16",
        overlap_tensor=int("asynctp" in technique),
        reported=given["tps_per_gpu"],
        unit=TOKENS,
    )


def _llm_foundry(given: Given) -> Iterator[Line]:
    """The A100 tables state 1,600 Gbit/s between nodes, which is what their nodes in the catalogue have."""
    gpus, hidden = int(given["num_gpus"]), int(given["d_model"])
    gpu, eight = given["gpu"].replace("_", "-"), "fp8" in given["precision"]
    nodes = {"h100-80gb": "dgx-h100", "a100-80gb": "dgx-a100", "a100-40gb": "dgx-a100-40gb"}
    yield line_of(
        id=f"llm-foundry-{gpu}-{'fp8' if eight else 'bf16'}-{given['model']}-{gpus}-{given['seqlen_t']}",
        source=f"llm-foundry-{gpu}{'-fp8' if eight else ''}",
        software="fsdp-2023",
        node=nodes[gpu],
        gpus=gpus,
        **shape_of(
            int(given["n_layers"]), hidden, int(given["n_heads"]), int(given["n_heads"]), 4 * hidden, GPT
        ),
        vocabulary=given["vocab_size"],
        sequence=given["seqlen_t"],
        dp=gpus,
        tp=1,
        pp=1,
        zero=3 if given["sharding_strategy"] == "FULL_SHARD" else 2,
        micro_batch=given["microbatchsize"],
        global_batch=given["globalbatchsize"],
        recompute="full" if given["activation_checkpointing"] == "True" else "none",
        dtype="float8" if eight else "bfloat16",
        gradient_dtype="bfloat16" if given["mp_mode"] == "PURE" else "float32",
        reported=given["throughput_t_s_gpu"],
        unit=TOKENS,
    )


def _nanotron(given: Given) -> Iterator[Line]:
    """The figure prints no sequence length; the script that made it has 4,096, which fits the printed 1M tokens.
    The machines were AWS's (Tazi et al. 2025), so the network is EFA."""
    tp = int(given["tp"])
    yield line_of(
        id=f"nanotron-{given['params_b']}b-{given['gpus']}",
        source="nanotron-2025",
        software="nanotron-2025",
        node="dgx-h100",
        fabric="efa",
        gpus=given["gpus"],
        **MODELS[f"nanotron-{given['params_b']}"],
        sequence=4096,
        dp=given["dp"],
        tp=tp,
        pp=given["pp"],
        zero=given["zero"],
        sequence_parallel=int(tp > 1),
        micro_batch=given["micro_batch"],
        global_batch=given["global_batch_seqs"],
        overlap_tensor=int(tp > 1),
        reported=given["mfu_pct"],
        unit=FULL_MFU,
    )


def _dgxc(given: Given) -> Iterator[Line]:
    """NVIDIA's benchmark recipes: everything is printed but the interleaving of stages, which the recipes have.
    Tensor-parallel collectives are overlapped."""
    tp, pp, cp, gpus = (int(given[name]) for name in ("tp", "pp", "cp", "gpus"))
    virtual = int(given["virtual_stages"])
    gated = "not gated" not in given["ffn"]
    kind = GPT if given["model"].startswith("gpt") else LLAMA if gated else NEMOTRON
    gpu, eight = given["gpu"].removesuffix("-sxm"), given["precision"] == "fp8"
    layers, hidden, heads, kv_heads = (int(given[name]) for name in ("layers", "hidden", "heads", "kv_heads"))
    yield line_of(
        id=f"dgxc-{gpu}-{given['model']}-{gpus}-{given['precision']}",
        source=f"dgxc-2025-{gpu}",
        software="nemo-2025",
        node={"h100": "dgx-h100", "gb200": "gb200-nvl72"}[gpu],
        gpus=gpus,
        **shape_of(layers, hidden, heads, kv_heads, int(given["ffn"].split()[0]), kind),
        vocabulary=given["vocab"],
        sequence=given["seq_len"],
        dp=gpus // (tp * pp * cp),
        tp=tp,
        pp=pp,
        cp=cp,
        zero=given["zero"],
        sequence_parallel=int(given["sequence_parallel"] == "true"),
        chunks_per_stage=virtual if virtual > 1 and pp > 1 else "",
        micro_batch=given["micro_batch"],
        global_batch=given["global_batch"],
        dtype="float8" if eight else "bfloat16",
        gradient_dtype="bfloat16",
        overlap_tensor=int(tp > 1),
        reported=given["step_s"],
        unit=SECONDS,
    )


# By how a table's file name begins.
READERS: dict[str, Callable[[Given], Iterator[Line]]] = {
    "megatron_sc21": _narayanan,
    "korthikanti2022_throughput": _korthikanti,
    "megatron_core": _megatron_core,
    "nemo": read_nemo,
    "megatron_bridge": read_nemo,
    "torchtitan": _torchtitan,
    "llm_foundry": _llm_foundry,
    "nanotron": _nanotron,
    "dgxc": _dgxc,
}
