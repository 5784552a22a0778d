"""Many adapters in one engine: every request gets the tokens of its adapter alone and of the merged model, in
float64; adapters come and go while others are answered."""

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cumulo.engine.adapters import AdapterStore
from cumulo.engine.assembly import assemble
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.engine import Engine
from cumulo.engine.llm import LLM
from cumulo.engine.outputs import RequestOutput
from cumulo.errors import CumuloError, InvalidRequest, ModelError
from cumulo.kernels.cpu.library import native
from cumulo.models.adapters.bank import AdapterBank
from cumulo.models.adapters.config import greatest_rank
from cumulo.models.adapters.files import AdapterWeights, adaptable_matrices, read_adapter
from cumulo.models.decoder import Decoder
from cumulo.models.files.load import inspect_model, load_model
from cumulo.models.play.fused import why_not as fused_why_not
from tests import thorough
from tests.engine.equivalence import Lengths, draw_requests
from tests.engine.ranked_models import save_model
from tests.engine.split_engines import PrefillThread, decode_engine, run_split, wait_for_peers
from tests.engine.tiny_engine import SPECS, VOCAB, make_decoder, make_engine, run
from tests.models.adapter_files import ALL, write_adapter

MODELS = ("dense", "window", "latent", "experts")
LATENT = ("q_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj", "gate_proj")
RANKS = (1, 4, 7, 16, 30)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


def merged(decoder: Decoder, weights: AdapterWeights) -> Decoder:
    """The same model with an adapter's product added to its weights."""
    found = copy.deepcopy(decoder)
    for matrix in adaptable_matrices(decoder.spec):
        weight = found.get_parameter(f"{matrix.name}.weight")
        for section in matrix.sections:
            if (pair := weights.pairs.get(section.source)) is not None:
                weight.data[section.start : section.stop] += pair.scale * (pair.b.double() @ pair.a.double())
    return found


class Family:
    """A model with an adapter in every slot but one, and the merged models."""

    def __init__(self, name: str, folder: Path) -> None:
        plain, spec = make_decoder(name), SPECS[name]
        self.decoder = make_decoder(name)
        self.bank = AdapterBank(self.decoder, spec, len(RANKS) + 1, max(RANKS))
        self.weights: list[AdapterWeights] = []
        self.merged = {"": plain}
        for slot, rank in enumerate(RANKS):
            targets = (LATENT if name == "latent" else ALL)[slot % 3 :]
            path = write_adapter(
                folder / f"{name}{slot}", spec, rank=rank, seed=slot, targets=targets, strength=rank
            )
            self.weights.append(read_adapter(path, spec, max(RANKS)))
            self.merged[f"a{slot}"] = merged(plain, self.weights[-1])

    def engine(self, **options) -> Engine:
        engine = make_engine(self.decoder, max_loras=self.bank.slots, **options)
        self.give(engine)
        return engine

    def give(self, engine: Engine) -> None:
        engine.runner.bank, engine.runner.table.serves_adapters = self.bank, True
        slots = engine.scheduler.adapters
        engine.adapters = AdapterStore(self.decoder.spec, slots, max(RANKS), self.bank.install)
        for slot, weights in enumerate(self.weights):
            engine.adapters.add(f"a{slot}", weights)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: Family(name, folder) for name in MODELS}


def assert_same(got: RequestOutput, expected: RequestOutput, nats: float) -> None:
    assert got.error is None and expected.error is None
    assert [s.token_ids for s in got.samples] == [s.token_ids for s in expected.samples]
    for ours, theirs in zip(got.samples, expected.samples, strict=True):
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert abs(one.logprob - other.logprob) <= nats
    if expected.embedding is not None:
        assert got.embedding == pytest.approx(expected.embedding, abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=thorough.examples(4), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), budget=st.sampled_from([7, 24, 64]), overlap=st.booleans())
def test_a_batch_of_many_adapters_gives_each_request_the_tokens_of_its_own(
    name, families, seed, budget, overlap
):
    """Prompts share prefixes, blocks run short and sequences are preempted. Log-probabilities are within 1e-12 of
    the adapter alone and within 1e-10 of the merged model."""
    rng, family = random.Random(seed), families[name]
    requests = draw_requests(rng, rng.randrange(2, 7), VOCAB, Lengths(prefix=30, own=12, answer=10))
    chosen = [rng.choice(["", *family.merged]) for _ in requests]
    engine = family.engine(
        blocks=26, block_size=4, max_running=5, max_tokens_per_step=budget, overlap=overlap
    )
    for index, ((prompt, params, priority, salt), adapter) in enumerate(zip(requests, chosen, strict=True)):
        engine.add(
            prompt, params, request_id=f"r{index}", priority=priority, cache_salt=salt, adapter=adapter
        )
    outputs = run(engine)
    engine.runner.close()
    for index, ((prompt, params, _, _), adapter) in enumerate(zip(requests, chosen, strict=True)):
        alone = family.engine(blocks=64, prefix_cache=False)
        alone.add(prompt, params, request_id="one", adapter=adapter)
        assert_same(outputs[f"r{index}"], run(alone)["one"], 1e-12)
        whole = make_engine(family.merged[adapter], blocks=64, prefix_cache=False)
        whole.add(prompt, params, request_id="one")
        assert_same(outputs[f"r{index}"], run(whole)["one"], 1e-10)


def test_adapters_change_what_is_said(families) -> None:
    """Guards the test above: its adapters are strong enough to be noticed."""
    family = families["dense"]
    engine = family.engine(blocks=64)
    for adapter in family.merged:
        engine.add([3, 5, 9], GREEDY, request_id=adapter or "base", adapter=adapter)
    said = {name: tuple(output.samples[0].token_ids) for name, output in run(engine).items()}
    assert len(set(said.values())) == len(said)


# -- they come and go ---------------------------------------------------------------------------------------------
def test_a_dropped_adapter_ends_what_it_began_and_its_slot_is_used_again(families) -> None:
    family = families["dense"]
    engine = family.engine(blocks=64)
    store, slots = engine.adapters, engine.scheduler.adapters
    expected = engine.add([3, 5, 9], GREEDY, request_id="before", adapter="a1")
    first = run(engine)["before"]
    engine.add([3, 5, 9], GREEDY, request_id="running", adapter="a1")
    engine.step()
    assert store.drop("a1") == 1
    with pytest.raises(InvalidRequest, match="no adapter 'a1'; there are: a0, a2"):
        engine.add([3], GREEDY, adapter="a1")
    # The one free slot is the spare one; that of the dropped one is taken until its request has ended.
    store.add("a1", family.weights[3])
    with pytest.raises(InvalidRequest, match=r"all 6 places for adapters are taken \(a1 has requests"):
        store.add("more", family.weights[0])
    engine.add([3, 5, 9], GREEDY, request_id="anew", adapter="a1")
    outputs = run(engine)
    assert_same(outputs["running"], first, 1e-12)
    whole = make_engine(family.merged["a3"], blocks=64)
    whole.add([3, 5, 9], GREEDY, request_id="one")
    assert_same(outputs["anew"], run(whole)["one"], 1e-10)
    assert not slots.leaving and expected.adapter == 1
    assert store.add("more", family.weights[0]).slot == 1
    family.bank.install(1, family.weights[1])


def test_an_aborted_request_lets_go_of_its_adapter(families) -> None:
    engine = families["dense"].engine(blocks=64)
    for name in ("queued", "running"):
        engine.add([3, 5, 9], GREEDY, request_id=name, adapter="a0")
    engine.step()
    assert engine.scheduler.adapters.running("a0") == 2
    for name in ("queued", "running"):
        engine.abort(name)
    run(engine)
    assert engine.scheduler.adapters.running("a0") == 0


def test_kv_blocks_are_found_by_the_weights_of_an_adapter_not_by_its_name(families) -> None:
    family = families["dense"]
    engine = family.engine(blocks=64, block_size=4)
    prompt = list(range(20))

    def cached(adapter: str) -> int:
        request = engine.add(prompt, GREEDY, adapter=adapter)
        run(engine)
        return request.story.cached_tokens

    assert cached("a0") == 0  # computes
    assert cached("a0") == 16  # finds
    assert cached("a1") == 0 and cached("") == 0  # other weights
    engine.adapters.drop("a0")
    engine.adapters.add("a0", family.weights[4])
    assert cached("a0") == 0  # the name has other weights now
    engine.adapters.add("again", family.weights[0])
    assert cached("again") == 16  # equal weights under another name
    for slot, weights in enumerate(family.weights):
        family.bank.install(slot, weights)


def test_the_story_names_the_adapter(families) -> None:
    engine = families["dense"].engine(blocks=64)
    request = engine.add([3, 5], GREEDY, adapter="a2")
    run(engine)
    assert "answered with the adapter a2, of rank 7" in request.story.describe()


# -- prompts computed by another engine ---------------------------------------------------------------------------
def test_prompts_are_computed_elsewhere_with_the_same_adapter_or_here_if_it_is_not_there(
    families, tmp_path
) -> None:
    family, address = families["dense"], f"unix:{tmp_path}/prefill.sock"
    other = Family("dense", tmp_path)  # a decoder of its own, as another process has
    prefill = PrefillThread(other.decoder, address, blocks=64, block_size=4, max_loras=6)
    decode = decode_engine(family.decoder, [("prefill-0", address)], blocks=64, block_size=4, max_loras=6)
    other.give(prefill.engine)
    family.give(decode)
    prefill.engine.adapters.drop("a1")
    prompt = [(7 * k) % VOCAB for k in range(30)]
    try:
        wait_for_peers(decode)
        stories, outputs = {}, {}
        for adapter in ("a0", "a1"):
            stories[adapter] = decode.add(prompt, GREEDY, request_id=adapter, adapter=adapter).story
            outputs |= run_split(decode)
    finally:
        decode.link.close()
        decode.runner.close()
        prefill.finish()
    for adapter, story in stories.items():
        whole = make_engine(family.merged[adapter], blocks=64)
        whole.add(prompt, GREEDY, request_id="one")
        assert_same(outputs[adapter], run(whole)["one"], 1e-10)
        assert ("KV blocks from prefill-0 are here" in story.describe()) == (adapter == "a0")
    assert "not loaded here" in stories["a1"].describe()


# -- over several ranks -------------------------------------------------------------------------------------------
TIGHT = dict(device="cpu", dtype="float64", block_size=4, max_context=64, max_running=5, max_tokens_per_step=24,
             kv_blocks=17, max_loras=4, max_lora_rank=16)  # fmt: skip


@pytest.fixture(scope="module")
def ranked_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("dense", tmp_path_factory.mktemp("ranked"))


def play_adapters(model: Path, folders: list[Path], **options: Any) -> dict[str, RequestOutput]:
    """Load three adapters, answer with all, drop one and load another in its place, answer again."""
    blocks = TIGHT["kv_blocks"] * options.get("dp", 1)
    assembly = assemble(model, EngineConfig(**{**TIGHT, "kv_blocks": blocks, **options}), True, None)
    engine = assembly.engine
    try:
        for index in range(3):
            engine.adapters.add(f"a{index}", engine.adapters.read(folders[index]))
        rng = random.Random(4)
        requests = draw_requests(rng, 6, 40, Lengths(prefix=20, own=10, answer=10))
        for index, (prompt, params, _, _) in enumerate(requests):
            adapter = f"a{index % 4}" if index % 4 < 3 else ""
            engine.add(prompt, params, request_id=f"r{index}", adapter=adapter)
        for _ in range(3):
            engine.step()
        engine.adapters.add("a3", engine.adapters.read(folders[3]))
        engine.adapters.drop("a0")
        engine.add([7, 8, 9], GREEDY, request_id="late", adapter="a3")
        return run(engine)
    finally:
        assembly.player.runner.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ({"tp": 2}, "dense"),
        ({"pp": 2}, "dense"),
        ({"pp": 2, "dtype": "float32"}, "fused"),
        pytest.param({"dp": 2, "ep": 2}, "experts", marks=pytest.mark.thorough),
        pytest.param({"tp": 2, "pp": 2}, "latent", marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_ranks_add_their_parts_of_every_adapter(layout, name, ranked_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed", reason="this torch has no distributed package")
    """The fused model is one whose every size is a multiple of the vector width."""
    if name == "fused":
        model = save_model("dense", tmp_path, head_dim=16)
        assert fused_why_not(load_model(model).decoder) is None or native() is None
    else:
        model = ranked_model if name == "dense" else save_model(name, tmp_path)
    spec = inspect_model(model).spec
    projections = ("q_a_proj", "q_b_proj", *LATENT[1:]) if name == "latent" else ALL
    folders = [
        write_adapter(
            tmp_path / str(index), spec, rank=rank, seed=index, targets=projections[index:], strength=1.0
        )
        for index, rank in enumerate((3, 16, 5, 8))
    ]
    expected = play_adapters(model, folders, dtype=layout.get("dtype", "float64"))
    got = play_adapters(model, folders, **layout)
    assert got.keys() >= {"late"}
    for name, output in got.items():
        assert_same(output, expected[name], 1e-12)


# -- what people meet ---------------------------------------------------------------------------------------------
def test_an_llm_answers_each_prompt_with_the_adapter_it_names(ranked_model: Path, tmp_path: Path) -> None:
    spec = inspect_model(ranked_model).spec
    folders = {
        name: write_adapter(tmp_path / name, spec, seed=seed, strength=1.0) for seed, name in enumerate("xy")
    }
    prompt, params = [5, 6, 7], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(ranked_model, lora=folders, kv_blocks=40, max_context=64, dtype="float64") as llm:
        assert llm.adapters == ("x", "y")
        together = llm.generate([prompt] * 3, params, adapter=["x", None, "y"])
        said = [output.samples[0].token_ids for output in together]
        assert len(set(map(tuple, said))) == 3
        assert llm.generate(prompt, params, adapter="y")[0].samples[0].token_ids == said[2]
        assert [t for delta in llm.stream(prompt, params, adapter="x") for t in delta.token_ids] == said[0]
        row = llm.ledger["adapters"]
        elements = sum(
            pair.a.numel() + pair.b.numel() for pair in read_adapter(folders["x"], spec, 16).pairs.values()
        )
        assert row.measured == 2 * 8 * elements
        assert row.predicted >= row.measured
        with pytest.raises(InvalidRequest, match="there are: x, y"):
            llm.generate(prompt, params, adapter="z")
        llm.drop_adapter("x")
        llm.load_adapter("x", folders["y"])
        assert llm.generate(prompt, params, adapter="x")[0].samples[0].token_ids == said[2]
        with pytest.raises(ModelError, match="no folder"):
            llm.load_adapter("w", tmp_path / "w")
    with (
        LLM(ranked_model, kv_blocks=40, max_context=64) as plain,
        pytest.raises(CumuloError, match="max_loras"),
    ):
        plain.load_adapter("x", folders["x"])


def test_the_model_that_contains_an_adapter_refuses_it(ranked_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(ranked_model, tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", inspect_model(model).spec)
    with pytest.raises(ModelError, match="already, merged by cumulo train"):
        LLM(model, lora={"x": adapter}, kv_blocks=40, max_context=64)


def test_room_is_made_for_the_adapters_that_are_named(tmp_path: Path) -> None:
    spec = SPECS["dense"]
    folders = [write_adapter(tmp_path / str(rank), spec, rank=rank) for rank in (4, 40)]
    ranks = [greatest_rank(folder) for folder in folders]
    config = EngineConfig().with_adapters(ranks)
    assert (config.max_loras, config.max_lora_rank) == (8, 40)
    assert EngineConfig(max_loras=2).with_adapters(ranks).max_loras == 2
    with pytest.raises(CumuloError, match="max_loras is 1"):
        EngineConfig(max_loras=1).with_adapters(ranks)
    assert EngineConfig().with_adapters([]) == EngineConfig()


def test_weights_in_sixteen_bits_are_read_as_they_are(tmp_path: Path) -> None:
    spec = SPECS["dense"]
    folder = write_adapter(tmp_path / "half", spec, dtype=torch.bfloat16)
    decoder = make_decoder("dense")
    bank = AdapterBank(decoder, spec, 1, 16)
    weights = read_adapter(folder, spec, 16)
    bank.install(0, weights)
    pair, stack = weights.pairs["model.layers.1.mlp.down_proj"], bank.matrices["layers.1.ffn.down"].stack
    assert torch.equal(stack.a[0, :4], pair.a.double())
    assert torch.equal(stack.b[0, :, :4], pair.b.double() * 2.0)
