#!/usr/bin/env bash
# The server from a shell. Set OUTRIDER_URL and OUTRIDER_KEY where they differ from the defaults.
set -euo pipefail
url=${OUTRIDER_URL:-http://127.0.0.1:8000}
ask() { curl --silent --show-error --fail-with-body --header "Authorization: Bearer ${OUTRIDER_KEY:-none}" "$@"; echo; }
json=(--header "Content-Type: application/json" --data)

ask "$url/health"
ask "$url/v1/models"

# A chat; temperature 0 is greedy.
ask "$url/v1/chat/completions" "${json[@]}" \
  '{"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 32, "temperature": 0}'

# A stream; each event is one line that begins with "data: ".
ask --no-buffer "$url/v1/completions" "${json[@]}" \
  '{"prompt": "One, two, three,", "max_tokens": 16, "temperature": 0, "stream": true}'

# An answer in the form of a regular expression, exact under speculation.
ask "$url/v1/completions" "${json[@]}" \
  '{"prompt": "My telephone number is ", "max_tokens": 32, "structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}'

# The same without speculation, and how often drafts were right so far.
ask "$url/v1/completions" "${json[@]}" '{"prompt": "One, two,", "max_tokens": 8, "speculative": false}'
ask "$url/metrics" | grep spec_decode_num || true
