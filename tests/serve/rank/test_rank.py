"""/v1/score and /v1/rerank against a real server; `transformers` with the same weights is the oracle."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from cumulo.serve.access.keys import new_key
from tests import peers
from tests.engine.pooled_reference import reference_embedding
from tests.serve.running_server import RunningServer, running_server
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long

CONTEXT = 512
QUERY = "where did the cat sit?"
DOCUMENTS = ["the cat sat on the mat", "def add(first, second):", "we have seen 3 of 10 cases — 😀"]
RERANK: dict[str, Any] = {"model": NAME, "query": QUERY, "documents": DOCUMENTS}
SCORE: dict[str, Any] = {"model": NAME, "text_1": QUERY, "text_2": DOCUMENTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("rank"), CONTEXT)


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, str]:
    path = folder.parent / "keys.json"
    return {"ann": new_key(path, "ann"), "bob": new_key(path, "bob", tokens_per_minute=40)}


@pytest.fixture(scope="module")
def server(folder: Path, keys: dict[str, str]) -> Iterator[RunningServer]:
    # The queue holds fewer than a call of many documents has: they must follow each other.
    with running_server(
        str(folder), "--api-keys", str(folder.parent / "keys.json"), "--max-running", "8", "--max-queue", "80"
    ) as running:
        yield running


class Oracle:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = peers.transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json")
        )
        self.model = peers.transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def cosine(self, first: str, second: str, pooling: Any = "mean", tokens: int | None = None) -> float:
        one = reference_embedding(self.model, self.tokenizer.encode(first), pooling)
        other = reference_embedding(self.model, self.tokenizer.encode(second)[:tokens], pooling)
        return float(np.asarray(one) @ np.asarray(other))

    def likelihood(self, query: str, document: str) -> float:
        """exp(mean log p(query token | passage, instruction, earlier tokens of the query))."""
        wanted = self.tokenizer.encode(" " + query)
        prompt = [
            token
            for part in (
                "Passage:",
                " " + document,
                "\nPlease write a question based on this passage.\nQuestion:",
            )
            for token in self.tokenizer.encode(part)
        ]
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + wanted])).logits[0].double()
        logprobs = torch.log_softmax(logits, -1)
        chosen = [logprobs[len(prompt) + place - 1, token] for place, token in enumerate(wanted)]
        return float(torch.stack(chosen).mean().exp())


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def post(
    server: RunningServer, keys: dict[str, str], path: str, body: Any, key: str = "ann"
) -> httpx.Response:
    return server.post(path, body, headers={"Authorization": f"Bearer {keys[key]}"})


def good(server: RunningServer, keys: dict[str, str], path: str, body: Any) -> Any:
    answer = post(server, keys, path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- what they answer ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_scores_are_cosines_of_transformers_embeddings(
    server: RunningServer, keys: dict[str, str], oracle: Oracle, pooling: str
) -> None:
    answer = good(server, keys, "/v1/score", SCORE | {"pooling": pooling})
    assert answer["object"] == "list" and answer["model"] == NAME and answer["id"].startswith("score-")
    assert [(item["object"], item["index"]) for item in answer["data"]] == [("score", n) for n in range(3)]
    expected = [oracle.cosine(QUERY, document, pooling) for document in DOCUMENTS]
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, atol=5e-4)
    # The query is embedded once, whatever it is held against.
    tokens = sum(len(oracle.tokenizer.encode(text)) for text in (QUERY, *DOCUMENTS))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens


def test_likelihood_is_the_querys_probability_after_the_document(
    server: RunningServer, keys: dict[str, str], oracle: Oracle
) -> None:
    answer = good(server, keys, "/v1/score", SCORE | {"method": "likelihood"})
    expected = [oracle.likelihood(QUERY, document) for document in DOCUMENTS]
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, rtol=2e-3)
    assert len(set(expected)) == 3 and "completion_tokens" not in answer["usage"]


def test_pairs_are_one_to_one_one_to_many_or_many_to_as_many(
    server: RunningServer, keys: dict[str, str], oracle: Oracle
) -> None:
    single = good(server, keys, "/v1/score", SCORE | {"text_2": DOCUMENTS[0]})["data"]
    assert len(single) == 1
    pairs = good(server, keys, "/v1/score", SCORE | {"text_1": [QUERY, "x y", DOCUMENTS[2]]})["data"]
    expected = [oracle.cosine(*pair) for pair in zip([QUERY, "x y", DOCUMENTS[2]], DOCUMENTS, strict=True)]
    np.testing.assert_allclose([item["score"] for item in pairs], expected, atol=5e-4)
    assert pairs[2]["score"] == pytest.approx(1, abs=1e-6) and pairs[2]["score"] <= 1
    for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        named = {"model": NAME, first: QUERY, second: DOCUMENTS[0]}
        assert good(server, keys, "/v1/score", named)["data"] == single


@pytest.mark.parametrize("method", ["embedding", "likelihood"])
def test_reranked_documents_come_best_first(
    server: RunningServer, keys: dict[str, str], oracle: Oracle, method: str
) -> None:
    answer = good(server, keys, "/v1/rerank", RERANK | {"method": method})
    how = oracle.cosine if method == "embedding" else oracle.likelihood
    scores = [how(QUERY, document) for document in DOCUMENTS]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [result["index"] for result in answer["results"]] == order
    assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[n] for n in order]
    got = [result["relevance_score"] for result in answer["results"]]
    np.testing.assert_allclose(got, [scores[n] for n in order], rtol=2e-3)
    assert answer["id"].startswith("rerank-") and answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
def test_rerank_takes_the_options_of_cohere_and_jina(
    server: RunningServer, keys: dict[str, str], oracle: Oracle, path: str
) -> None:
    body = RERANK | {"documents": [{"text": document} for document in DOCUMENTS], "top_n": 2}
    best = good(server, keys, path, body | {"return_documents": False})["results"]
    assert len(best) == 2 and all(set(result) == {"index", "relevance_score"} for result in best)
    assert best == [
        {name: result[name] for name in ("index", "relevance_score")}
        for result in good(server, keys, path, body | {"top_n": 99})["results"][:2]
    ]
    cut = good(server, keys, path, RERANK | {"max_tokens_per_doc": 3})
    for result in cut["results"]:
        expected = oracle.cosine(QUERY, DOCUMENTS[result["index"]], tokens=3)
        assert result["relevance_score"] == pytest.approx(expected, abs=5e-4)
    assert cut["usage"]["prompt_tokens"] == len(oracle.tokenizer.encode(QUERY)) + 9


def test_a_thousand_documents_are_ranked_in_one_call(
    server: RunningServer, keys: dict[str, str], oracle: Oracle
) -> None:
    """More than running and waiting requests may be at once."""
    documents = [f"the {number} cats" for number in range(1000)]
    results = good(server, keys, "/v1/rerank", RERANK | {"documents": documents})["results"]
    assert sorted(result["index"] for result in results) == list(range(1000))
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert results[0]["relevance_score"] == pytest.approx(
        oracle.cosine(QUERY, documents[results[0]["index"]]), abs=5e-4
    )


# -- what they refuse ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"]}, "text_1"),
        ("/v1/score", {"text_2": []}, "text_2"),
        ("/v1/score", {"text_2": ["x", ""]}, "text_2[1]"),
        ("/v1/score", {"text_2": ["x"] * 1001}, "text_2"),
        ("/v1/score", {"method": "guess"}, "method"),
        ("/v1/score", {"query": "x"}, "query"),
        ("/v1/score", {"queries": "x"}, "queries"),
        ("/v1/rerank", {"query": ""}, "query"),
        ("/v1/rerank", {"documents": []}, "documents"),
        ("/v1/rerank", {"documents": ["x"] * 1001}, "documents"),
        ("/v1/rerank", {"documents": ["x", 7]}, "documents[1]"),
        ("/v1/rerank", {"documents": [{"title": "x"}]}, "documents[0]"),
        ("/v1/rerank", {"top_n": 0}, "top_n"),
        ("/v1/rerank", {"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v1/rerank", {"pooling": "median"}, "pooling"),
        ("/v1/rerank", {"priority": -1}, "priority"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:30],
)
def test_a_wrong_field_is_named(
    server: RunningServer, keys: dict[str, str], path: str, change: Any, param: str
) -> None:
    answer = post(server, keys, path, (SCORE if path == "/v1/score" else RERANK) | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"].startswith(param)


@pytest.mark.parametrize("path", ["/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"])
def test_strangers_and_other_models_are_refused(
    server: RunningServer, keys: dict[str, str], path: str
) -> None:
    body = SCORE if path.endswith("score") else RERANK
    assert server.post(path, body).status_code == 401
    assert post(server, keys, path, body | {"model": "rerank-v3.5"}).status_code == 404


def test_texts_must_fit_the_context_and_count_against_the_limit(
    server: RunningServer, keys: dict[str, str]
) -> None:
    long = RERANK | {"documents": ["x y " * CONTEXT]}
    answer = post(server, keys, "/v1/rerank", long)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert good(server, keys, "/v1/rerank", long | {"max_tokens_per_doc": 100})["results"]
    statuses = [post(server, keys, "/v1/rerank", RERANK, "bob").status_code for _ in range(2)]
    assert statuses == [200, 429]


# -- how they run -------------------------------------------------------------------------------------------------
def test_every_text_has_its_story_and_its_caller(server: RunningServer, keys: dict[str, str]) -> None:
    answer = post(server, keys, "/v1/rerank", RERANK)
    call = answer.json()["id"]
    assert answer.headers["x-request-id"] == call
    ann, bob = (
        server.get(f"/v1/requests/{call}/explain", headers={"Authorization": f"Bearer {keys[name]}"})
        for name in ("ann", "bob")
    )
    assert len(ann.json()["data"]) == 4 and bob.status_code == 404


def test_the_description_has_them(server: RunningServer) -> None:
    description = server.get("/openapi.json").json()
    for path, name in (("/v1/score", "ScoreRequest"), ("/v1/rerank", "RerankRequest")):
        operation = description["paths"][path]["post"]
        assert set(operation["responses"]) == {"200", "400", "401", "404", "413", "429", "503"}
        assert description["components"]["schemas"][name]["properties"]["model"]["enum"] == [NAME]
