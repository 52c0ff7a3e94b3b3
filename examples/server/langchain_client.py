"""The same server as a LangChain chat model.

outrider serve smollm2-135m          (in another terminal)
pip install langchain-openai
python examples/server/langchain_client.py
"""

import os

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(
    base_url=os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("OUTRIDER_KEY", "none"),
    model=os.environ.get("OUTRIDER_NAME", "smollm2-135m"),
    temperature=0,
    max_tokens=64,
    stream_usage=True,
    extra_body={"speculative": True},
)
for piece in chat.stream("Name three rivers."):
    print(piece.content, end="", flush=True)
print()
