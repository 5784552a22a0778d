"""Log-probabilities and stories as plain data: everything a request returns can be written as JSON."""

import json

from cumulo import LLM, SamplingParams

with LLM() as llm:
    output = llm.generate("Two plus two is", SamplingParams(temperature=0, max_tokens=4, logprobs=3))[0]
    for entry in output.samples[0].logprobs:
        choices = {llm.tokenizer.decode([token]): round(logprob, 3) for token, logprob in entry.top}
        print(f"{llm.tokenizer.decode([entry.token])!r} from {choices}")
    print(json.dumps(output.to_dict(), indent=2))
