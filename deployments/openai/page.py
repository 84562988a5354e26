"""The small chat page at ``/``: one file, no external resources."""

from __future__ import annotations

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}

HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Blockserve</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 0 auto; padding: 1rem; }
  header, form { display: flex; gap: .5rem; align-items: center; }
  h1 { font-size: 1.1rem; margin: 0; flex: 1; }
  #log { min-height: 50vh; margin: 1rem 0; }
  .m { white-space: pre-wrap; overflow-wrap: anywhere; padding: .5rem .75rem; margin: .5rem 0; }
  .user { background: #e8eef7; } .assistant { background: #f3f3f1; } .error { background: #fbe3e1; }
  [hidden] { display: none !important; } input { flex: 1; font: inherit; padding: .4rem; }
  textarea { flex: 1; font: inherit; padding: .5rem; } button, select { font: inherit; padding: .4rem .7rem; }
  footer { color: #666; font-size: .85rem; min-height: 1.5em; }
</style>
</head>
<body>
<header><h1>Blockserve</h1>
  <label for="model">Model</label> <select id="model"></select>
  <button id="clear" type="button">New chat</button></header>
<form id="keyform" hidden>
  <label for="key">API key</label> <input id="key" type="password" autocomplete="off" spellcheck="false">
  <button>Use</button>
</form>
<div id="log" aria-live="polite"></div>
<form id="form">
  <textarea id="text" rows="2" aria-label="Message" placeholder="Message"></textarea>
  <button id="send">Send</button> <button id="stop" type="button" disabled>Stop</button>
</form>
<footer id="status"></footer>
<script>
"use strict";
const $ = id => document.getElementById(id);
// The key lives in this variable only; a reload asks for it again.
let turns = [], controller = null, key = "";

function show(kind, text) {
  const node = document.createElement("div");
  node.className = "m " + kind;
  node.textContent = text;
  $("log").append(node);
  node.scrollIntoView({block: "end"});
  return node;
}

async function call(path, options = {}) {
  const headers = {...options.headers, ...(key && {authorization: "Bearer " + key})};
  const response = await fetch(path, {...options, headers});
  if (response.status === 401) $("keyform").hidden = false;
  if (!response.ok) throw new Error((await response.json()).error.message);
  return response;
}

async function models() {
  const list = await (await call("v1/models")).json();
  $("model").replaceChildren(...list.data.map(model => new Option(model.id, model.id)));
}

const loadModels = () => models().catch(error => show("error", error.message));

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\\n\\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function send(text) {
  turns.push({role: "user", content: text});
  show("user", text);
  const node = show("assistant", "");
  const start = performance.now();
  let answer = "", first = 0;
  controller = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("status").textContent = "";
  try {
    const response = await call("v1/chat/completions", {
      method: "POST", signal: controller.signal, headers: {"content-type": "application/json"},
      body: JSON.stringify({model: $("model").value, messages: turns, stream: true, temperature: 0,
                            stream_options: {include_usage: true}})});
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices[0]?.delta?.content;
      if (piece) {
        first ||= performance.now();
        node.textContent = answer += piece;
      }
      if (event.usage) {
        const seconds = (performance.now() - start) / 1000, u = event.usage;
        $("status").textContent = `${u.completion_tokens} tokens in ${seconds.toFixed(1)} s, first after ` +
          `${((first - start) / 1000).toFixed(2)} s, ` +
          `${(u.completion_tokens / Math.max(1, u.num_forwards)).toFixed(1)} tokens per forward`;
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    if (answer) turns.push({role: "assistant", content: answer}); else { turns.pop(); node.remove(); }
    controller = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || controller) return;
  $("text").value = "";
  send(text);
});
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("form").requestSubmit(); }
});
$("stop").addEventListener("click", () => controller?.abort());
$("clear").addEventListener("click", () => {
  controller?.abort();
  turns = [];
  $("log").replaceChildren();
});
$("keyform").addEventListener("submit", event => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  $("keyform").hidden = true;
  loadModels();
});
loadModels();
</script>
</body>
</html>
"""
