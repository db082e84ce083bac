// Asks this worker for figures again and again and hands them to the view. Knows the token, deadlines
// and what can go wrong; how figures look is decided in view.js.

import { formatSpan, formatTime } from "./format.js";
import { showFigures } from "./view.js";

const TOKEN_NAME = "cachalot-token";
const THEME_NAME = "cachalot-theme";
const THEMES = ["system", "light", "dark"];
const POLL_S = 5;
const POLL_AFTER_FAILURE_S_MAX = 30;
const REQUEST_DEADLINE_S = 8;
const WINDOWS = [["1 h", 3600], ["6 h", 21600], ["24 h", 86400]];
const SOURCES = { status: "api/status", workers: "api/workers", nodes: "api/nodes",
  agents: "api/agents", policy: "api/policy", history: "api/history", events: "api/events" };

const $ = (id) => document.getElementById(id);

const state = {
  token: sessionStorage.getItem(TOKEN_NAME) ?? "",
  figures: {},
  receivedAt: {},
  windowS: WINDOWS[0][1],
  shownAt: null,
  failures: 0,
  timer: 0,
  round: 0,
};

// What can go wrong with one request: `kind` is "token", "unreachable" or "answer".
class RequestError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

async function ask(path) {
  let answer;
  try {
    answer = await fetch(path, {
      headers: { authorization: `Bearer ${state.token}` },
      cache: "no-store",
      signal: AbortSignal.timeout(REQUEST_DEADLINE_S * 1000),
    });
  } catch (error) {
    const why = error.name === "TimeoutError" ? `no answer within ${REQUEST_DEADLINE_S} s` : "no connection";
    throw new RequestError("unreachable", why);
  }
  if (answer.status === 401 || answer.status === 403) throw new RequestError("token", "refused");
  if (!answer.ok) throw new RequestError("answer", `/${path}: ${await explain(answer)}`);
  try {
    return await answer.json();
  } catch {
    throw new RequestError("answer", `/${path}: the answer is not JSON`);
  }
}

async function explain(answer) {
  try {
    const { error, given, expected } = await answer.json();
    return [error, given && `given ${given}`, expected && `expected ${expected}`]
      .filter(Boolean).join("; ");
  } catch {
    return `status ${answer.status}`;
  }
}

async function poll() {
  clearTimeout(state.timer);
  if (!state.token) {
    askForToken("");
    return;
  }
  const round = ++state.round;
  const names = Object.keys(SOURCES);
  const results = await Promise.allSettled(names.map((name) => ask(SOURCES[name])));
  // The token may have been forgotten, or another round begun, while this one waited.
  if (round !== state.round) return;
  const errors = results.filter(({ status }) => status === "rejected").map(({ reason }) => reason);
  if (errors.some(({ kind }) => kind === "token")) {
    forgetToken("This token was refused. It may be of another worker, or of before a restart.");
    return;
  }
  for (const [index, name] of names.entries()) {
    if (results[index].status === "fulfilled") {
      state.figures[name] = results[index].value;
      state.receivedAt[name] = Date.now() / 1000;
    }
  }
  state.failures = errors.length ? state.failures + 1 : 0;
  if (errors.length < names.length) state.shownAt = Date.now() / 1000;
  const waitS = errors.length ? Math.min(POLL_S * 2 ** (state.failures - 1), POLL_AFTER_FAILURE_S_MAX) : POLL_S;
  show(errors, waitS);
  state.timer = setTimeout(poll, waitS * 1000);
}

function show(errors, waitS) {
  $("sign-in").hidden = true;
  $("forget").hidden = false;
  const isDown = errors.length === Object.keys(SOURCES).length
    && errors.every(({ kind }) => kind === "unreachable");
  const again = `Asking again in ${formatSpan(waitS)}.`;
  if (isDown) {
    const since = state.shownAt === null ? "Nothing was received yet."
      : `What is shown is of ${formatTime(state.shownAt)}.`;
    showAlert(`The worker does not answer (${errors[0].message}). ${since} ${again}`);
    setConnection("Not connected", "bad");
  } else if (errors.length) {
    showAlert(`Some figures are missing or old. ${errors.map(({ message }) => message).join(" · ")}. ${again}`);
    setConnection(`Partly as of ${formatTime(state.shownAt)}`, "warn");
  } else {
    showAlert("");
    setConnection(`As of ${formatTime(state.shownAt)}`, "good");
  }
  render(isDown);
}

function render(isStale) {
  const isKnown = Object.keys(state.figures).length > 0;
  $("figures").hidden = !isKnown;
  $("figures").classList.toggle("stale", isStale);
  if (!isKnown) return;
  try {
    showFigures(state.figures, state.receivedAt, state.windowS);
  } catch (error) {
    // A worker of another version: say so, rather than show half of a page without a word.
    showAlert(`These figures are not understood (${error.message}). Is the page of the worker's version?`);
    throw error;
  }
}

function setConnection(text, quality) {
  $("connection").textContent = text;
  $("connection").className = quality;
}

function showAlert(text) {
  // Only a change is read out by a screen reader.
  if ($("alert").textContent !== text) $("alert").textContent = text;
  $("alert").hidden = !text;
}

function askForToken(why) {
  $("sign-in").hidden = false;
  $("figures").hidden = true;
  $("forget").hidden = true;
  showAlert(why);
  setConnection("Not connected", "");
  $("token").focus();
}

function forgetToken(why) {
  clearTimeout(state.timer);
  state.round += 1;
  state.token = "";
  state.figures = {};
  state.receivedAt = {};
  state.failures = 0;
  sessionStorage.removeItem(TOKEN_NAME);
  askForToken(why);
}

function chooseTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME_NAME, theme);
  $("theme").textContent = `Theme: ${theme}`;
}

function currentTheme() {
  const stored = localStorage.getItem(THEME_NAME);
  return THEMES.includes(stored) ? stored : "system";
}

function addWindowButtons() {
  const buttons = WINDOWS.map(([name, windowS]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => {
      state.windowS = windowS;
      mark();
      render($("figures").classList.contains("stale"));
    });
    return button;
  });
  const mark = () => buttons.forEach((button, index) => {
    button.setAttribute("aria-pressed", String(WINDOWS[index][1] === state.windowS));
  });
  mark();
  $("windows").replaceChildren(...buttons);
}

$("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = $("token").value.trim();
  $("token").value = "";
  if (!/^[\x21-\x7e]+$/.test(state.token)) {
    forgetToken("A token is one word of letters, digits and signs.");
    return;
  }
  sessionStorage.setItem(TOKEN_NAME, state.token);
  setConnection("Connecting", "");
  poll();
});
$("forget").addEventListener("click", () => forgetToken(""));
$("theme").addEventListener("click", () => {
  chooseTheme(THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length]);
});
addEventListener("resize", () => render($("figures").classList.contains("stale")));
document.addEventListener("visibilitychange", () => {
  // Nobody looks: ask nothing, and be up to date at once when somebody does.
  if (document.hidden) clearTimeout(state.timer);
  else poll();
});

chooseTheme(currentTheme());
addWindowButtons();
poll();
