"""Talk to a running server with the official client.

outrider serve smollm2-135m          (in another terminal)
pip install openai
python examples/server/openai_client.py
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("OUTRIDER_KEY", "none"),
)
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three rivers."}],
    max_tokens=64,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"speculative": True},  # what OpenAI does not know goes there: top_k, context_budget, ...
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    else:
        usage = chunk.usage

details = usage.completion_tokens_details
print(f"\n{usage.completion_tokens} tokens, {details.accepted_prediction_tokens} of them drafted by a small model")
