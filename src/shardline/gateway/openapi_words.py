"""What the fields of requests mean, in a sentence each, and which errors an operation can answer with.

Owns the words of `GET /openapi.json`; the whole story of each field is docs/api.md. Types and limits are not said here:
they stand in the structs. tests/gateway/test_openapi.py holds that every field of ours has its words.
"""

from __future__ import annotations

FIELDS: dict[str, str] = {
    # Of several endpoints.
    "model": "A name from GET /v1/models, or a content id from there. Never another model than this one answers.",
    "messages": "The conversation, for the chat template of the model. A last message of the assistant is continued.",
    "max_tokens": "Most tokens of the answer; what does not fit into the context is cut from it.",
    "max_completion_tokens": "Another name of max_tokens; of both, the smaller counts.",
    "max_output_tokens": "Most tokens of the answer; cut there, its status is incomplete.",
    "temperature": "0 is argmax.",
    "top_p": "Nucleus sampling. 0 is refused: say a temperature of 0.",
    "top_k": "Only the k likeliest tokens; 0 and -1 mean all of them.",
    "min_p": "Extension (llama-server, vLLM): only tokens at least so likely, against the likeliest one.",
    "repeat_penalty": "Extension (llama-server): penalty of tokens that came before; 1 is none.",
    "repetition_penalty": "Extension (vLLM): another name of repeat_penalty.",
    "presence_penalty": "Taken from the logits of tokens that came before.",
    "frequency_penalty": "As often as they came.",
    "logit_bias": "By token id; -100 bans, 100 forces. One token at least must be left.",
    "seed": "The same one on the same route gives the same answer; -1 is none. Choice i samples with seed + i.",
    "stop": "The answer ends in front of the first of these.",
    "stop_sequences": "The answer ends in front of the first of these.",
    "n": "Choices of each prompt; every one is a Route Session.",
    "min_tokens": "Extension (vLLM): no end of generation before so many tokens.",
    "ignore_eos": "Extension (llama-server, vLLM): no end of generation but by max_tokens and stop.",
    "stream": "Server-sent events instead of one object.",
    "stream_options": "Only with stream.",
    "include_usage": "A last chunk with the usage.",
    "include_telemetry": "Extension (Shardline): chunks have the account of the Route Session in telemetry.",
    "include_obfuscation": "May be false only: nothing is padded.",
    "return_progress": "Extension (llama-server): chunks with prompt_progress while the prompt is computed.",
    "timings_per_token": "Extension (llama-server): timings in chunks and in the answer.",
    "cache_prompt": "Extension (llama-server): false computes the whole prompt anew, and leaves nothing behind.",
    "response_format": "What the answer must be; it is kept to by the tail of the route, whatever strict says.",
    "grammar": "Extension (llama-server, vLLM): Lark as llguidance reads it, or GBNF, that the answer matches.",
    "regex": "Extension (Shardline): a regular expression that the whole answer matches.",
    "store": "May be false only: nothing is stored.",
    "service_tier": "Only what asks for nothing.",
    "tools": "Functions that the model may call.",
    "tool_choice": "Whether it may call (auto), must (required), must not (none), or which one it must call.",
    "parallel_tool_calls": "False, with a call that must be made: one call only.",
    # Of chat completions.
    "logprobs": "Log-probabilities of the tokens; in completions, of so many alternatives.",
    "top_logprobs": "Alternatives of each token; needs logprobs.",
    "modalities": "Text only.",
    "reasoning_format": "Extension (llama-server): none leaves thinking in the content; the others split it off.",
    "reasoning_effort": "Given to the chat template, where that looks at it; else refused.",
    "chat_template_kwargs": "Extension (llama-server, vLLM): variables of the chat template, such as enable_thinking.",
    "reasoning_content": "Extension (DeepSeek, vLLM): what the model thought in an earlier answer.",
    # Of completions.
    "prompt": "A string, token ids, or a list of either; every one is answered.",
    "echo": "The prompt in front of the answer; not with logprobs or suffix.",
    "suffix": "What comes behind the answer, for models that were made for infilling.",
    "best_of": "1 only.",
    # Of responses.
    "input": "What there is to answer to, or to make vectors of.",
    "instructions": "A system message in front of the input.",
    "text": "The form of the answer.",
    "reasoning": "The effort, where the chat template of the model knows of it.",
    # Of messages.
    "system": "One system message.",
    "disable_parallel_tool_use": "One call only.",
    # Of embeddings.
    "encoding_format": "Numbers, or base64 of little-endian float32.",
    "dimensions": "So many values of each vector, normalised again.",
    "pooling": "Extension (Shardline): how one vector is made of those of all tokens; absent: as the model has it.",
    "embd_normalize": "Extension (llama-server): 2 Euclid, 1 the sum of magnitudes, 0 the largest as int16, -1 none.",
    # Of llama-server's questions.
    "content": "Text.",
    "add_special": "With the tokens that the model wants around a prompt.",
    "parse_special": "May be true only: control tokens in the text are read as such.",
    "with_pieces": "Objects with the text of each token.",
    "tokens": "Token ids.",
}
"""Field -> what it means; only of the members of a request itself, and of the structs in `NESTED`."""
NESTED = frozenset({"StreamOptions", "Message"})

KEY = frozenset({"unauthorized", "forbidden"})
ALWAYS = frozenset({"headers_too_large", "too_many_connections", "internal"})
BODY = frozenset(
    {
        *("invalid_json", "invalid_value", "unsupported_parameter", "body_too_large", "unsupported_media_type"),
        *("slow_body", "resources_exhausted", "cancelled"),
    }
)
MODEL = frozenset(
    {"model_not_found", "model_unavailable", "gateway_expelled", "tracker_unreachable", "text_unavailable"}
)
ROUTE = frozenset(
    {
        *("context_length_exceeded", "rate_limit_exceeded", "concurrency_limit_exceeded", "queue_full", "capacity"),
        *("kv_exhausted", "draining", "node_lost", "seam_lost", "seam_gap", "seam_invalid", "numerical_error"),
        *("shard_unready", "node_refused", "engine_lost", "engine_error", "engine_out_of_memory", "deadline"),
        *("slow_client", "gateway_lost", "queue_overflow", "rollback_unsupported"),
    }
)
SAMPLED = frozenset({"no_token_left", "grammar_invalid"})
TEMPLATE = frozenset({"template_error", "template_busy", "template_lost"})
