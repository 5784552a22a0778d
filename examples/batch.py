"""Many prompts in one call: each with parameters of its own, all computed together, each with its story."""

from cumulo import LLM, SamplingParams

requests = [
    ("The sun rises in the", SamplingParams(temperature=0, max_tokens=8)),
    ("Once upon a time", SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=32)),
    ("My favourite animals are", SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=12)),
    ("To be, or not to be", SamplingParams(beam_width=3, max_tokens=12)),
]

with LLM() as llm:
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    for output in outputs:
        for sample in output.samples:
            print(f"{output.prompt} |{sample.text}  [{sample.finish_reason}]")
        story = output.story
        print(f"  waited {story.queue_s * 1e3:.1f} ms, first token after {story.ttft_s * 1e3:.1f} ms")

    print("\nThe second request's life:")
    print(outputs[1].story.describe())
