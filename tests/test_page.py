"""Tests that assets/page.html, in headless Chromium, shows what the server has sent.

The browser is driven over WebDriver's HTTP interface (w3.org/TR/webdriver2). The server is the real
one, but its Conductor writes prepared workflows, and its workers are Python functions.
"""

import base64
import json
import re
import shutil
import subprocess
import time

import pytest
import requests

import players
import workflow
from players import Player, lost
from workflow import Step, Workflow, as_lists

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER), reason="needs chromium and chromedriver"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
ENTER = "\ue007"  # WebDriver's code for the Enter key


class Browser:
    """One tab of a headless Chromium."""

    def __init__(self, driver: str):
        options = {"binary": CHROMIUM, "args": FLAGS}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        self.url = f"{driver}/session"
        session = self.call("POST", "", capabilities={"alwaysMatch": wanted})
        self.url = f"{driver}/session/{session['sessionId']}"

    def call(self, method: str, path: str, **body):
        response = requests.request(method, self.url + path, json=body or {}, timeout=60)
        value = response.json()["value"]
        assert response.ok, value
        return value

    def open(self, url: str):
        self.call("POST", "/url", url=url)

    def run(self, script: str):
        """Return the value of a JavaScript expression."""
        return self.call("POST", "/execute/sync", script=f"return {script}", args=[])

    def wait_for(self, script: str):
        """Return the value of a JavaScript expression once it is truthy; fail after a minute."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            value = self.run(script)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}\n{self.run('document.body.innerText')}")

    def type(self, selector: str, text: str):
        found = self.call("POST", "/element", using="css selector", value=selector)
        [element] = found.values()
        self.call("POST", f"/element/{element}/value", text=text)

    def resize(self, width: int, height: int):
        self.call("POST", "/window/rect", width=width, height=height)

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("GET", "/screenshot")))


@pytest.fixture(scope="module")
def browser():
    driver = subprocess.Popen(
        [CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        port = next(
            found[1]
            for line in driver.stdout
            if (found := re.search(r"started successfully on port (\d+)", line))
        )
        tab = Browser(f"http://127.0.0.1:{port}")
        yield tab
        tab.call("DELETE", "")
    finally:
        driver.kill()


def served(pool, *workflows, **settings):
    """Serve a Conductor that writes these workflows in turn, then repeats the last.

    Each workflow is a list of steps. Returns a context manager that yields the server's URL.
    """
    texts = [as_lists(Workflow([Step(*step) for step in steps])) for steps in workflows]
    return players.served(pool, *texts, **settings)


POOL = [
    Player("planner", lambda messages: "Divide it."),
    Player("solver", lambda messages: "6"),
    Player("checker", lambda messages: "<b id=injected>7</b><script>document.title='x'</script>"),
]
CHAIN = [(0, "Plan it.", []), (1, "Solve it.", []), (2, "Check both.", [0, 1])]


def ask(browser, url, question="What is 3 + 4?", done="#answer .answer"):
    browser.open(url)
    browser.wait_for("document.querySelector('#model').options.length > 0")
    browser.run("document.querySelector('#question').value = ''")
    browser.type("#question", question + ENTER)
    browser.wait_for(f"document.querySelector({json.dumps(done)}) !== null")


def test_a_question_is_asked_by_keyboard_and_its_workflow_is_drawn(browser):
    with served(POOL, CHAIN) as url:
        ask(browser, url)
        boxes = browser.run("[...document.querySelectorAll('.box')].map(box => box.innerText)")
        levels = browser.run("[...document.querySelectorAll('.level')].map(l => l.children.length)")
        arrows = browser.run("document.querySelectorAll('.arrow').length")
        total = browser.run("document.querySelector('#answer p').textContent")

    assert levels == [2, 1] and arrows == 2
    assert [text.split("\n")[0] for text in boxes] == ["0: planner", "1: solver", "2: checker"]
    assert "Check both." in boxes[2] and "sees steps 0, 1" in boxes[2] and "$0.5" in boxes[2]
    assert total.startswith("3 calls") and "$1.5" in total


def test_markup_in_a_reply_is_shown_as_text(browser):
    with served(POOL, CHAIN) as url:
        ask(browser, url)
        assert browser.run("document.querySelector('#injected')") is None
        assert browser.run("document.title") == "Conductor"
        shown = browser.run("document.querySelector('#answer .answer').textContent")
    assert shown == POOL[2].answer([])


def ask_recursively(browser, url: str):
    """Choose the recursive Conductor, ask the page's example question, and wait for the answer."""
    browser.open(url)
    browser.wait_for("document.querySelector('#model').options.length > 1")
    browser.run("document.querySelector('#model').value = 'conductor-recursive'")
    browser.type("#question", ENTER)
    browser.wait_for("document.querySelector('#answer .answer') !== null")


def test_a_second_round_stands_below_the_first(browser):
    with served(POOL, CHAIN, [(1, "Solve it again.", [])], []) as url:
        ask_recursively(browser, url)
        heads = browser.run("[...document.querySelectorAll('#rounds h2')].map(h => h.textContent)")
    assert heads == ["Workflow", "Round 1"]


def test_an_error_appears_in_the_box_of_the_step_that_failed(browser):
    pool = [POOL[0], Player("away", lost)]
    with served(pool, [(0, "Plan it.", []), (1, "Solve it.", [0])]) as url:
        ask(browser, url, done=".box.failed")
        failed = browser.run("document.querySelector('.box.failed').innerText")
    assert failed.startswith("1: away") and "nobody answers" in failed


def test_a_step_of_a_lost_second_round_waits_no_longer_than_the_answer(browser):
    pool = [POOL[0], Player("away", lost)]
    with served(pool, [(0, "Plan it.", [])], [(1, "Solve it.", [])]) as url:
        ask_recursively(browser, url)
        boxes = browser.run("[...document.querySelectorAll('.box')].map(box => box.className)")
    assert boxes == ["box", "box failed"]


def test_the_page_asks_for_a_key_and_keeps_it_in_memory_only(browser):
    with served(POOL, CHAIN, api_key="sesame") as url:
        browser.open(url)
        browser.wait_for("!document.querySelector('#key-form').hidden")
        browser.type("#key", "sesame" + ENTER)
        browser.wait_for("document.querySelector('#model').options.length > 0")
        browser.type("#question", ENTER)
        browser.wait_for("document.querySelector('#answer .answer') !== null")
        stores = "[localStorage.length, sessionStorage.length, document.cookie, location.href]"
        assert browser.run(stores) == [0, 0, "", f"{url}/"]


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_window(browser, width):
    pool = [*POOL[:2], Player("worker_with_a_long_name" * 9, lost)]
    too_wide = "document.documentElement.scrollWidth > innerWidth"
    with served(pool, CHAIN[:2], CHAIN) as url:
        browser.resize(width, 900)
        ask(browser, url)
        assert not browser.run(too_wide)
        ask(browser, url, done=".box.failed")
        assert not browser.run(too_wide)
    with served(pool, CHAIN, write=fail) as url:
        ask(browser, url, done="#trouble:not([hidden])")
        assert not browser.run(too_wide)


def fail(rollouts):
    for rollout in rollouts:
        rollout.error = "none_of_the_hosts_answers" * 9
        yield rollout


def test_an_answer_that_never_came_is_no_empty_answer(browser, monkeypatch):
    with served([Player("silent", lambda messages: "")], CHAIN[:1]) as url:
        ask(browser, url)
        assert browser.run("document.querySelector('#answer .answer').textContent") != ""

    def stop(handler, text, *rest, **more):
        raise ConnectionAbortedError

    monkeypatch.setattr(workflow.ConductorHandler, "reply", stop)
    with served(POOL, CHAIN) as url:
        ask(browser, url, done="#trouble:not([hidden])")
        assert "stopped" in browser.run("document.querySelector('#trouble').textContent")
        assert browser.run("document.querySelector('#answer').textContent") == ""


def test_a_run_that_has_just_started_has_no_estimate_and_a_damaged_one_says_so(browser, tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({"preset": "laptop", "iterations": 2}))
    (tmp_path / "metrics.jsonl").write_text("")
    trouble = "document.querySelector('#trouble')"
    state = "document.querySelector('#run-state').textContent"
    with served(POOL, CHAIN, run=str(tmp_path)) as url:
        browser.open(url)
        browser.wait_for("!document.querySelector('#views').hidden")
        browser.run("document.querySelector('#show-run').click()")
        assert browser.wait_for(state) == "laptop: 0 of 2 iterations, no estimate yet"

        (tmp_path / "settings.json").write_text('{"preset": ')
        browser.run("document.querySelector('#reload').click()")
        browser.wait_for(f"!{trouble}.hidden")
        assert "settings.json is damaged" in browser.run(f"{trouble}.textContent")
        browser.open(url)
        browser.wait_for("!document.querySelector('#views').hidden")


def test_no_other_origin_may_use_the_page_and_no_foreign_script_runs(browser):
    with served(POOL, CHAIN) as url:
        headers = requests.get(url, timeout=60).headers
        browser.open(url)
        loose = (
            "document.body.append(Object.assign(document.createElement('script'), {text: 'x=1'}))"
        )
        browser.run(loose)
        assert browser.run("typeof x") == "undefined"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "Access-Control-Allow-Origin" not in headers


def test_a_run_is_shown_with_its_rollouts_and_its_curve(browser, tmp_path):
    step = {"worker": 0, "subtask": "Look it up.", "access": []}
    right = {
        "question": "What is <b>six</b>?",
        "call_prefix": "1/0/0",
        "previous": None,
        "workflow": {"steps": [step]},
        "names": ["librarian"],
        "replies": [{"text": "6"}],
        "reward": 1.0,
        "advantage": 0.7,
        "right": True,
        "error": None,
        "invalid": "",
        "failure": "",
    }
    none = {"workflow": None, "names": [], "replies": [], "reward": 0.0, "right": False}
    rollouts = [right, right | none | {"invalid": "model_id: the list is missing"}]
    row = {"iteration": 0, "accuracy": 0.5, "held_out": 0.25, "rollout_s": 60, "learning_s": 60}
    settings = {"preset": "laptop", "iterations": 2}
    (tmp_path / "traces").mkdir()
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "traces/00000.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rollouts))

    with served(POOL, CHAIN, run=str(tmp_path)) as url:
        browser.open(url)
        browser.wait_for("!document.querySelector('#views').hidden")
        browser.run("document.querySelector('#show-run').click()")
        browser.wait_for("document.querySelectorAll('.card').length === 2")
        cards = browser.run("[...document.querySelectorAll('.card')].map(c => c.innerText)")
        state = browser.run("document.querySelector('#run-state').textContent")
        points = browser.run("document.querySelectorAll('#curve .dot').length")

        # A finished run shows its last measurement, which is in a file of its own.
        (tmp_path / "settings.json").write_text(json.dumps(settings | {"iterations": 1}))
        test = {"laptop, conductor": {"accuracy": 0.982}, "laptop, random": {"accuracy": 0.0}}
        (tmp_path / "test.json").write_text(json.dumps(test))
        browser.run("document.querySelector('#reload').click()")
        browser.wait_for("document.querySelector('#run-state').textContent.includes('finished')")
        end = browser.run("document.querySelector('#run-state').textContent")

    assert end.endswith("finished: 98.2 % of the held-out questions are right")
    assert "right" in cards[0] and "advantage 0.70" in cards[0] and "librarian" in cards[0]
    assert "no workflow" in cards[1] and "the list is missing" in cards[1]
    assert state == "laptop: 1 of 2 iterations, about 2 min left" and points == 1
