"""The chat page's script, in Node with as much of a browser as it asks for when it loads."""

import json
import re
import shutil
import subprocess

import pytest

from deployments.openai import page

BROWSER = """
const fetched = [], listeners = {}, nodes = {};
const node = id => nodes[id] ??= {
  hidden: true, value: "", children: [],
  addEventListener(kind, act) { listeners[id + " " + kind] = act; },
  append(...items) { this.children.push(...items); },
  replaceChildren(...items) { this.children = items; },
  scrollIntoView() {}, remove() {}, requestSubmit() {},
};
globalThis.document = {getElementById: node, querySelector: node, createElement: () => node(Symbol())};
globalThis.Option = class { constructor(text) { this.text = text; } };
let locked = LOCKED;
globalThis.fetch = async (path, options = {}) => {
  fetched.push([path, options.headers?.authorization ?? null]);
  if (locked && !options.headers?.authorization)
    return {ok: false, status: 401, json: async () => ({error: {message: "a key is needed"}})};
  return {ok: true, status: 200, json: async () => ({data: [{id: "a"}, {id: "b"}]})};
};
"""
REPORT = """
const settle = () => new Promise(resolve => setTimeout(resolve, 20));
(async () => {
  await settle();
  const before = !node("keyform").hidden;
  if (locked) {
    node("key").value = " secret ";
    listeners["keyform submit"]({preventDefault() {}});
    await settle();
  }
  console.log(JSON.stringify({fetched, asked: before, models: node("model").children.map(option => option.text)}));
})();
"""


def load(locked: bool) -> dict:
    (script,) = re.findall(r"<script[^>]*>(.*?)</script>", page.HTML, re.DOTALL)
    program = BROWSER.replace("LOCKED", json.dumps(locked)) + script + REPORT
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def test_the_models_are_listed_when_the_page_loads():
    assert load(locked=False) == {"fetched": [["v1/models", None]], "asked": False, "models": ["a", "b"]}


def test_a_key_is_asked_for_and_used():
    assert load(locked=True) == {
        "fetched": [["v1/models", None], ["v1/models", "Bearer secret"]],
        "asked": True,
        "models": ["a", "b"],
    }
