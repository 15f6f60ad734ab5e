"""Runs llama.cpp (the wheel xllamacpp) on a GGUF file; as a process, because it aborts on bad ones.

Reads {"model", "prompts": [[id]], "texts": [text]} from stdin. Prints {"likeliest": the 20
likeliest next tokens of each prompt as [[id, log-probability]], "continued": the same after each
text, "lengths": how many tokens each text has}. All in float32: without flash attention, which
rounds to float16.
"""

import json
import sys
from typing import Any

import xllamacpp

LETTER = 64

task = json.load(sys.stdin)
parameters = xllamacpp.CommonParams()
parameters.model.path = task["model"]
parameters.n_ctx = 512
parameters.n_parallel = 1
parameters.n_gpu_layers = 0
parameters.warmup = parameters.fit_params = False
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(parameters)


def complete(prompt: object) -> dict[str, Any]:
    answer: dict[str, Any] = server.handle_completions(
        {
            "prompt": prompt,
            "n_predict": 1,
            "n_probs": 20,
            "temperature": 0.0,
            # The answer is a letter: one without text (EOS, half a character) would come without
            # probabilities. They are those before the bias.
            "logit_bias": [[LETTER, 1e6]],
            "cache_prompt": False,
        }
    )
    return answer


def likeliest(answer: dict[str, Any]) -> list[list[float]]:
    (choice,) = answer["choices"]
    tops = choice["logprobs"]["content"][0]["top_logprobs"]
    return [[top["id"], top["logprob"]] for top in tops]


by_ids = [complete(prompt) for prompt in task["prompts"]]
by_text = [complete(text) for text in task["texts"]]
result = {
    "likeliest": [likeliest(answer) for answer in by_ids],
    "lengths": [answer["usage"]["prompt_tokens"] for answer in by_text],
    "continued": [likeliest(answer) for answer in by_text],
}
print("\n" + json.dumps(result), flush=True)
