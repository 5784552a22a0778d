"""Text as it is made. Leaving the loop early ends the request in the engine, too."""

from cumulo import LLM, SamplingParams

with LLM() as llm:
    messages = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    stream = llm.stream(messages, SamplingParams(temperature=0, max_tokens=48))
    for delta in stream:
        print(delta.text, end="", flush=True)
    print()

    story, sample = stream.output.story, stream.output.samples[0]
    print(f"{story.output_tokens} tokens, first after {story.ttft_s:.2f} s, ended by {sample.finish_reason}")

    counting = llm.stream("1, 2, 3,", SamplingParams(temperature=0, max_tokens=200))
    for number, delta in enumerate(counting):
        print(delta.text, end="", flush=True)
        if number == 10:
            break
    counting.close()  # aborts: the engine computes no more of it
    print(" ...")
