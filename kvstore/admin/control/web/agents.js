// Puts the agents of compute hosts into the page.

import { fillBar, make, number } from "./elements.js";
import { NONE, formatBytes, formatCount, formatShare, formatSpan, isNumber, plural } from "./format.js";

const $ = (id) => document.getElementById(id);
const ROLES = 4;
const FIGURES = 8;
const NAMED = 3;

// `said`: the answer of api/agents. A cluster without agents has no such section.
export function showAgents({ agents = [], summary = "" }) {
  $("agents-section").hidden = agents.length === 0;
  $("agents-note").textContent = summary;
  $("agents").tBodies[0].replaceChildren(...agents.map(agentRow));
}

// The tile of the agents: name, value, note and quality; null for a cluster without any.
export function agentsTile({ agents = [] }) {
  if (!agents.length) return null;
  const alive = agents.filter(({ is_alive: is }) => is).length;
  const points = agents.filter(({ entrypoint }) => entrypoint);
  const down = points.filter(({ is_alive: is }) => !is).map(({ agent }) => agent);
  const note = down.length ? `${plural(down.length, "entrypoint", "entrypoints")} down: ${down.slice(0, NAMED).join(", ")}`
    + `${down.length > NAMED ? ", ..." : ""}`
    : points.length ? `${points.length === 1 ? "the entrypoint is" : `all ${points.length} entrypoints are`} up`
      : "none is an entrypoint";
  return ["Agents alive", `${alive} of ${agents.length}`, note,
    down.length ? "bad" : alive < agents.length ? "warn" : "good"];
}

function agentRow(agent) {
  const name = make("th", { scope: "row", title: agent.address }, agent.agent);
  if (!agent.is_alive) {
    const why = make("td", { class: "bad wide" }, `down: ${agent.problem || "does not answer"}`);
    const none = Array.from({ length: FIGURES }, () => number(NONE));
    return make("tr", {}, name, why, make("td", {}, NONE), make("td", {}, NONE), ...none);
  }
  return make("tr", {}, name, make("td", { class: "good" }, "alive"),
    make("td", {}, agent.roles.length === ROLES ? "all" : agent.roles.join(", ")), make("td", {}, arenaFill(agent)),
    number(formatBytes(agent.arena_bytes)), number(formatCount(agent.runs)),
    number(formatCount(agent.sessions)), number(formatCount(agent.fetch_queued)),
    number(formatCount(agent.window_records)), number(formatShare(agent.window_hit_ratio)),
    number(formatShare(agent.directory_share)), number(formatSpan(agent.uptime_s)));
}

function arenaFill({ agent, arena_bytes: size, arena_used_bytes: used }) {
  if (!isNumber(used) || !(size > 0)) return NONE;
  const fill = Math.min(used / size, 1);
  return fillBar(fill, { label: `arena of ${agent} in use`, text: formatShare(fill) });
}
