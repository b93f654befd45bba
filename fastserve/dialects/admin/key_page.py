"""The page by which a browser sends an API key: what a page of the server is answered without one.

A browser cannot send a key with a link. So a page without a key is a 401 whose body asks for one, fetches the
page with it, and shows that in its place; so do the page's style, its scripts and whatever they fetch from
this server. The key stays in the memory of the page: in no URL, cookie or storage. A reload asks again.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from fastserve.errors import Reason, ServeError
from fastserve.net.router import fault_headers, held_back_status

if TYPE_CHECKING:
    from fastserve.net import Call

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 20vh auto 0; max-width: 26rem; padding: 0 1rem; }
input { font: inherit; width: 100%; box-sizing: border-box; padding: .4rem; margin: .3rem 0 .8rem; }
button { font: inherit; padding: .3rem 1rem; }
:root { color-scheme: light dark; }
"""
# In a function: its names must not meet those of the page that it loads.
SCRIPT = """
(() => {
"use strict";
const form = document.getElementById("form"), state = document.getElementById("state");
const plain = window.fetch.bind(window);
let key = "";
function ask(path, options = {}) {
  const url = new URL(path, location.href), headers = new Headers(options.headers);
  if (url.origin === location.origin && !headers.has("authorization")) {
    headers.set("authorization", "Bearer " + key);
  }
  return plain(url, { ...options, headers });
}
async function load(path) {
  const reply = await ask(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(reply.status === 403 ? "This key does not allow this page."
    : reply.status === 401 ? "This key is not valid." : "The server answered " + reply.status + ".");
  return reply;
}
async function place(path) { return URL.createObjectURL(await (await load(path)).blob()); }
async function show() {
  const text = await (await load(location.pathname + location.search)).text();
  const page = new DOMParser().parseFromString(text, "text/html");
  for (const link of page.querySelectorAll("link[rel=stylesheet]")) {
    link.href = await place(link.getAttribute("href"));
  }
  const sources = [];
  for (const script of page.querySelectorAll("script[src]")) {
    sources.push(await place(script.getAttribute("src")));
    script.remove();
  }
  window.fetch = ask;
  document.replaceChild(document.adoptNode(page.documentElement), document.documentElement);
  for (const source of sources) {
    const script = document.createElement("script");
    script.src = source;
    await new Promise((done, failed) => {
      script.onload = done;
      script.onerror = failed;
      document.body.append(script);
    });
  }
}
form.addEventListener("submit", (event) => {
  event.preventDefault();
  key = form.elements.key.value.trim();
  show().catch((error) => { state.textContent = error.message || "The page could not be shown."; });
});
})();
"""
PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fastserve: API key</title>
<style>{STYLE}</style>
</head>
<body>
<form id="form">
<label for="key">This page needs an API key.</label>
<input id="key" name="key" type="password" autocomplete="off" spellcheck="false" required autofocus>
<button>Show</button> <span id="state" role="alert"></span>
</form>
<noscript>Without JavaScript, send the key in a header: Authorization: Bearer KEY.</noscript>
<script>{SCRIPT}</script>
</body>
</html>
""".encode()


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {_source(SCRIPT)} blob:; style-src {_source(STYLE)} blob:; "
    "connect-src 'self'; img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
).encode()
HEADERS = (
    (b"Content-Security-Policy", POLICY),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"Cache-Control", b"no-store"),
    (b"Vary", b"Accept"),
)


def ask_for_key(call: Call, fault: ServeError) -> bool:
    """Answer a browser that opens a page without an API key; return False for any other call."""
    if (
        fault.reason is not Reason.API_KEY
        or call.method != "GET"
        or b"text/html" not in call.header(b"accept")
    ):
        return False
    call.reply(held_back_status(fault), PAGE, b"text/html; charset=utf-8", (*HEADERS, *fault_headers(fault)))
    return True
