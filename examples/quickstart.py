"""The shortest useful program: the built-in model completes a sentence and answers a question."""

from cumulo import LLM, SamplingParams

with LLM() as llm:  # LLM("path/to/model.gguf"), LLM("folder") and LLM("owner/name") work alike
    greedy = SamplingParams(temperature=0, max_tokens=24)

    output = llm.generate("The three primary colours are", greedy)[0]
    print(output.prompt + output.text)

    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy)[0]
    print(answer.text)
