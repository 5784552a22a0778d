"""What an application with Outlines does, as a client of OpenAI's API and of vLLM's: `python outlines_client.py URL
MODEL`, results as JSON. No imports of ours: it runs in the clients' own environment."""

import json
import re
import sys
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
ASK = {"temperature": 0, "max_tokens": 64}
GRAMMAR = 'start: "x" ("," "x")~2'


class Person(BaseModel, extra="forbid"):
    name: Literal["Ann", "Bob"]
    age: int


def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=URL, api_key="none", max_retries=0)


openai_model, vllm_model = outlines.from_openai(client(), MODEL), outlines.from_vllm(client(), MODEL)
QUESTION = "What is the capital of France?"
pieces = list(vllm_model.stream(QUESTION, **ASK))
forms = {
    "regex": (Regex(r"[0-9]{2} degrees"), r"\d{2} degrees"),
    "choice": (Literal["Paris", "Rome"], "Paris|Rome"),
    "grammar": (CFG(GRAMMAR), "x,x,x"),
}
print(
    json.dumps(
        {
            "streaming": {
                "pieces": len(pieces),
                "joined": "".join(pieces),
                "whole": vllm_model(QUESTION, **ASK),
            },
            "structured": {
                name: json.loads(model("Ann is 42 years old.", Person, **ASK))
                for name, model in (("openai", openai_model), ("vllm", vllm_model))
            },
            "forms": {
                name: bool(re.fullmatch(form, vllm_model(QUESTION, kind, **ASK)))
                for name, (kind, form) in forms.items()
            },
        }
    )
)
