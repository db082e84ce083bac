// Puts figures into the page. Everything that comes from a node is text, never markup.

import { agentsTile, showAgents } from "./agents.js";
import { drawChart } from "./chart.js";
import { fillBar, make, number } from "./elements.js";
import { NONE, formatBytes, formatCount, formatShare, formatSpan, formatTime, isNumber, plural } from "./format.js";

const RECENT_S = 600;
const $ = (id) => document.getElementById(id);

const MISS_NAMES = {
  never_stored: "never stored", expired: "expired", evicted: "evicted for room",
  orphaned: "removed, too few shards", forgotten: "forgotten on request", not_stored: "not stored",
  too_few_shards: "too few shards answered", rejected: "damaged", deadline: "deadline passed",
};

// `figures`: the last answer of each route by name; `receivedAt`: when it came, in unix seconds.
export function showFigures(figures, receivedAt, windowS) {
  const { status = {}, nodes = {}, policy = {}, history = {}, events = {} } = figures;
  const rows = nodes.nodes ?? [];
  const workers = readWorkers(figures.workers ?? {});
  const own = status.worker?.node ?? "this node";
  for (const place of document.querySelectorAll(".own-node")) place.textContent = own;
  const points = readHistory(history, receivedAt.history, windowS);
  $("cluster-name").textContent = status.cluster ? String(status.cluster).slice(0, 8) : "";
  showTiles(status, workers, readHistory(history, receivedAt.history, RECENT_S), rows, figures.agents ?? {});
  showCharts(points, receivedAt.history ?? Date.now() / 1000, windowS, status);
  showHistoryTable(points);
  showNodes(rows, status, workers);
  showAgents(figures.agents ?? {});
  showRedundancy(status, workers);
  showMisses(rows);
  showAges(status);
  showPolicy(policy.policy ?? {}, policy.nodes ?? {}, rows);
  showEvents(events.events ?? []);
}

// History ------------------------------------------------------------------------------------------

// Points as objects, oldest first, each with `at` in unix seconds; of the finest tier that fits.
// Times are the reader's own clock minus an age: the clocks of nodes do not matter.
function readHistory(history, now, windowS) {
  const tiers = history.tiers ?? [];
  const tier = tiers.find((one) => one.window_s >= windowS) ?? tiers.at(-1);
  if (!tier) return [];
  const columns = history.columns;
  return tier.rows
    .map((row) => Object.fromEntries(columns.map((name, index) => [name, row[index]])))
    .filter((point) => point.age_s <= windowS)
    .map((point) => ({ ...point, at: now - point.age_s, step_s: tier.step_s }));
}

function hitRate(points) {
  const hit = sum(points.map((point) => point.hit_tokens));
  const miss = sum(points.map((point) => point.miss_tokens));
  return hit + miss > 0 ? hit / (hit + miss) : null;
}

function sum(values) {
  return values.reduce((total, value) => total + (isNumber(value) ? value : 0), 0);
}

function showCharts(points, now, windowS, status) {
  const range = [now - windowS, now];
  const draw = (id, top, format, label, lines, marks = []) => {
    const series = lines.map(([name, read]) => ({
      name, points: withGaps(points).map((point) => [point.at, point.age_s === null ? null : read(point)]),
    }));
    drawChart($(`${id}-chart`), { series, range, top, isWhole: format === formatCount, marks, format, label, readout: $(`${id}-readout`) });
    showLegend($(`${id}-legend`), lines.map(([name]) => name), marks);
  };
  const rate = hitRate(points);
  draw("hit", 1, formatShare, `Hit rate over the last ${formatSpan(windowS)}: ${formatShare(rate)}`,
    [["hit rate", (point) => hitRate([point])]]);
  const marks = Object.entries(status.policy?.watermarks ?? {})
    .map(([level, y]) => ({ name: `${level} watermark`, y }));
  draw("fill", 1, formatShare, `Fill of the fullest target, now ${formatShare(points.at(-1)?.fill)}`,
    [["fill", (point) => point.fill]], marks);
  draw("evicted", undefined, formatCount, `Shards evicted in ${formatSpan(windowS)}: ${countEvicted(points)}`,
    [["for room", (point) => point.evicted_least_used], ["expired", (point) => point.evicted_expired],
      ["too few shards", (point) => point.evicted_orphaned]]);
  draw("redundancy", undefined, formatCount, "Blocks that lack shards",
    [["readable", (point) => point.blocks_reduced], ["unreadable", (point) => point.blocks_unreadable]]);
}

// Where a step is missing, a point of nothing is put, so that the line is not drawn across.
function withGaps(points) {
  return points.flatMap((point, index) => {
    const before = points[index - 1];
    const isGap = before && point.at - before.at > 2.5 * point.step_s;
    return isGap ? [{ at: (point.at + before.at) / 2, age_s: null }, point] : [point];
  });
}

function countEvicted(points) {
  const names = ["evicted_least_used", "evicted_expired", "evicted_orphaned"];
  return formatCount(sum(names.flatMap((name) => points.map((point) => point[name]))));
}

function showLegend(place, names, marks) {
  place.replaceChildren(...names.map((name, index) => make("span", {},
    make("i", { class: `series-${index + 1}`, "aria-hidden": "true" }), `${name} `)),
  ...marks.map(({ name, y }) => make("span", {}, `- - ${name} ${formatShare(y)} `)));
}

function showHistoryTable(points) {
  const [head, body] = [$("history-table").tHead, $("history-table").tBodies[0]];
  const names = ["When", "Hit rate", "Hit tokens", "Missed tokens", "Fill", "Evicted", "Nodes alive"];
  head.replaceChildren(make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name))));
  body.replaceChildren(...points.toReversed().map((point) => make("tr", {},
    make("td", {}, formatTime(point.at)), number(formatShare(hitRate([point]))),
    number(formatCount(point.hit_tokens)), number(formatCount(point.miss_tokens)),
    number(formatShare(point.fill)), number(countEvicted([point])),
    number(`${formatCount(point.nodes_alive)} of ${formatCount(point.nodes_total)}`))));
}

// Workers ------------------------------------------------------------------------------------------

// What all workers counted together, and each one's row by its node.
function readWorkers({ workers = [], redundancy = null }) {
  const counts = [];
  for (const { blocks_by_shards: found } of workers) {
    for (const [shards, blocks] of (found ?? []).entries()) counts[shards] = (counts[shards] ?? 0) + blocks;
  }
  return { byNode: new Map(workers.map((worker) => [worker.node, worker])), counts, redundancy };
}

// Whose counts these are, and how old they may be: they are not of one moment.
function describeCounts({ redundancy }) {
  const { nodes_counted: counted, nodes_total: total, age_s: age } = redundancy;
  const whose = counted === total ? `all ${plural(total, "node", "nodes")}` : `${counted} of ${plural(total, "node", "nodes")}`;
  return isNumber(age) ? `${whose}, as of up to ${formatSpan(age)} ago` : whose;
}

// Now ----------------------------------------------------------------------------------------------

function showTiles(status, workers, recent, rows, agents) {
  const fullest = allTargets(rows, workers).reduce((best, one) => ((one.fill ?? -1) > (best.fill ?? -1) ? one : best), {});
  const redundancy = countRedundancy(workers, status.code);
  const counted = redundancy.whole + redundancy.reduced + redundancy.unreadable;
  const alive = status.nodes_alive;
  const versions = Object.values(status.policy?.versions ?? {});
  const isShared = versions.every((version) => version === status.policy.version);
  const tiles = [
    ["Nodes alive", isNumber(alive) ? `${alive} of ${status.nodes_total}` : NONE,
      spareText(status), status.spare_nodes < 0 ? "bad" : alive < status.nodes_total ? "warn" : "good"],
    agentsTile(agents),
    ["Hit rate", formatShare(hitRate(recent)), "of tokens, last 10 min", ""],
    ["Fullest target", formatShare(fullest.fill), fullest.target ?? "", fillQuality(fullest.fill, status)],
    ["Blocks with all shards", counted ? formatShare(redundancy.whole / counted) : NONE,
      counted ? `of ${formatCount(counted)}, counted by ${describeCounts(workers)}` : "not counted yet",
      redundancy.unreadable ? "bad" : redundancy.reduced ? "warn" : ""],
    ["Policy", isNumber(status.policy?.version) ? `version ${status.policy.version}` : NONE,
      isShared ? "the same on all nodes that answer" : "not yet on all nodes", isShared ? "" : "warn"],
  ];
  $("tiles").replaceChildren(...tiles.filter(Boolean).map(([name, value, note, quality]) => make("div", {},
    make("dt", {}, name), make("dd", { class: `value ${quality}` }, value), make("dd", { class: "note" }, note))));
}

function spareText({ spare_nodes: spare }) {
  if (!isNumber(spare)) return "";
  if (spare < 0) return `blocks are unreadable until ${plural(-spare, "node is", "nodes are")} back`;
  return spare === 0 ? "no further one may fail" : `${plural(spare, "more", "more")} may fail`;
}

// Nodes --------------------------------------------------------------------------------------------

function allTargets(rows, { byNode }) {
  return rows.flatMap((row) => (row.statistics?.targets ?? []).map((target) => {
    const usage = byNode.get(row.node)?.usage?.[target.name];
    const fill = target.is_lost ? null : usage?.fraction ?? fillOf(target);
    return { ...target, node: row.node, target: target.name, fill };
  }));
}

// Of bytes, never of slots, which have several sizes.
function fillOf({ used_bytes: used, capacity_bytes: capacity }) {
  return isNumber(used) && capacity > 0 ? Math.min(used / capacity, 1) : null;
}

function fillQuality(fill, status) {
  const high = status.policy?.watermarks?.high;
  if (!isNumber(fill) || !isNumber(high)) return "";
  return fill > (1 + high) / 2 ? "bad" : fill > high ? "warn" : "";
}

function showNodes(rows, status, workers) {
  const targets = allTargets(rows, workers);
  const draining = new Set(status.policy?.draining ?? []);
  $("nodes").tBodies[0].replaceChildren(...rows.flatMap((row) => {
    const own = targets.filter(({ node }) => node === row.node);
    const age = workers.byNode.get(row.node)?.count_age_s;
    const counted = isNumber(age) ? `${formatSpan(age)} ago` : NONE;
    if (!row.is_alive || !own.length) return [nodeRow(row, null, draining, status, counted)];
    return own.map((target) => nodeRow(row, target, draining, status, counted));
  }));
}

function nodeRow(row, target, draining, status, counted) {
  const [text, quality] = describeState(row, target, draining);
  const cells = [make("th", { scope: "row" }, row.node), make("td", { class: `${quality} wide` }, text)];
  if (target === null || target.is_lost) {
    // What a lost folder held is not there any more, whatever the node remembers.
    const name = target?.name ?? NONE;
    cells.push(make("td", {}, name), make("td", {}, NONE), ...Array.from({ length: 5 }, () => number(NONE)));
  } else {
    cells.push(make("td", {}, target.name), make("td", {}, targetFill(target.fill, target.name, status)),
      number(formatBytes(target.used_bytes)), number(formatBytes(target.capacity_bytes)),
      number(formatCount(target.blocks)), number(formatCount(target.rejected_shards)),
      number(formatSpan(row.statistics.uptime_s)));
  }
  cells.push(number(counted));
  return make("tr", {}, ...cells);
}

function describeState(row, target, draining) {
  if (!row.is_alive) return [`down: ${row.problem || "does not answer"}`, "bad"];
  if (target?.is_lost) return ["its folder is lost", "bad"];
  return draining.has(row.node) ? ["draining", "warn"] : ["alive", "good"];
}

function targetFill(fill, name, status) {
  if (!isNumber(fill)) return NONE;
  const { high, low } = status.policy?.watermarks ?? {};
  const marks = [["low", low], ["high", high]].filter(([, value]) => isNumber(value)).map(([which, value]) => {
    const mark = make("span", { class: "mark", title: `${which} watermark ${formatShare(value)}` });
    mark.style.left = `${value * 100}%`;
    return mark;
  });
  return fillBar(fill, { label: `fill of ${name}`, text: formatShare(fill), marks, quality: fillQuality(fill, status),
    valueText: `${formatShare(fill)}, watermarks ${formatShare(low)} and ${formatShare(high)}` });
}

// Redundancy, misses, ages, policy, events ---------------------------------------------------------

function countRedundancy({ counts }, code) {
  const health = { whole: 0, reduced: 0, unreadable: 0 };
  for (const [shards, blocks] of blocksByShards(counts)) health[shardHealth(shards, code)] += blocks;
  return health;
}

// Pairs of a number of shards and the blocks that have so many, most shards first.
function blocksByShards(counts) {
  return counts.map((blocks, shards) => [shards, blocks]).slice(1).reverse();
}

function shardHealth(shards, code) {
  if (!code) return "whole";
  return shards >= code.k + code.m ? "whole" : shards >= code.k ? "reduced" : "unreadable";
}

const HEALTH_CLASS = { whole: "good", reduced: "warn", unreadable: "bad" };

function showRedundancy({ code }, workers) {
  const { counts, redundancy } = workers;
  if (!counts.some((blocks) => blocks > 0)) {
    $("redundancy-note").textContent = "No block is counted yet: that takes a minute after a start.";
    $("redundancy").replaceChildren();
    return;
  }
  $("redundancy-note").textContent = `Blocks of the cluster, counted by ${describeCounts(workers)}; `
    + `waiting for repair: ${formatCount(redundancy.repair_backlog ?? 0)}.`;
  // Numbers of shards from which a block can be read are shown even if no block has so many.
  const rows = blocksByShards(counts).filter(([shards, blocks]) => blocks > 0 || shards >= (code?.k ?? 0));
  showBars($("redundancy"), rows.map(([shards, blocks]) => {
    const health = shardHealth(shards, code);
    const text = { whole: "all", reduced: "readable", unreadable: "unreadable" }[health];
    return [`${plural(shards, "shard", "shards")} (${text})`, blocks, HEALTH_CLASS[health]];
  }));
}

function showMisses(rows) {
  const tokens = {};
  const keys = {};
  for (const { statistics } of rows) {
    for (const { miss_tokens: misses } of Object.values(statistics?.namespaces ?? {})) addAll(tokens, misses);
    for (const { misses_by_reason: misses } of statistics?.targets ?? []) addAll(keys, misses);
  }
  const isAny = [...Object.values(tokens), ...Object.values(keys)].some((value) => value > 0);
  $("misses-note").textContent = isAny
    ? "Since the nodes started. Tokens as clients report them; keys as nodes know why they lack them."
    : "Nothing was missed since the nodes started.";
  const bars = (of, unit) => Object.entries(of).filter(([, value]) => value > 0).sort(([, a], [, b]) => b - a)
    .map(([reason, value]) => [`${unit}: ${MISS_NAMES[reason] ?? reason}`, value, ""]);
  // Tokens and keys are different units, so each has bars of its own scale.
  showBars($("misses"), bars(tokens, "tokens"), bars(keys, "keys"));
}

function addAll(into, values) {
  for (const [name, value] of Object.entries(values ?? {})) {
    if (isNumber(value)) into[name] = (into[name] ?? 0) + value;
  }
}

function showBars(place, ...groups) {
  place.replaceChildren(...groups.flatMap((bars) => {
    const highest = Math.max(1, ...bars.map(([, value]) => value));
    return bars.flatMap(([name, value, quality]) => {
      const level = make("div", { class: `level ${quality}` });
      level.style.width = `${(value / highest) * 100}%`;
      return [make("span", {}, name), make("div", { class: "track", "aria-hidden": "true" }, level),
        make("span", { class: "value" }, formatCount(value))];
    });
  }));
}

function showAges({ ages, worker }) {
  const [head, body] = [$("ages").tHead, $("ages").tBodies[0]];
  const classes = Object.entries(ages?.by_class ?? {});
  $("ages").hidden = !classes.length;
  $("ages-note").textContent = classes.length
    ? `Shards on ${worker?.node ?? "this node"} alone, looked at ${formatTime(ages.at_s)}.`
    : ages ? `There are no blocks on ${worker?.node ?? "this node"}.` : "The worker has not looked yet.";
  if (!classes.length) return;
  const bounds = ages.bounds_s.map((bound) => `≤ ${formatSpan(bound)}`);
  const names = [...bounds, `> ${formatSpan(ages.bounds_s.at(-1))}`];
  head.replaceChildren(make("tr", {}, make("th", { scope: "col" }, "Class"),
    ...names.map((name) => make("th", { scope: "col", class: "number" }, name))));
  body.replaceChildren(...classes.map(([name, counts]) => make("tr", {},
    make("th", { scope: "row" }, name), ...counts.map((count) => number(formatCount(count), count ? "" : "zero")))));
}

function showPolicy(policy, versions, rows) {
  const last = policy.log?.at(-1);
  const marks = policy.watermarks ?? {};
  $("policy-note").textContent = `Version ${policy.version ?? NONE}. Watermarks: ${formatShare(marks.low)} and `
    + `${formatShare(marks.high)}. ${last ? `Last change ${formatTime(last.at_s, true)} by ${last.who}: ${last.what}`
      + `${last.why ? ` (${last.why})` : ""}.` : "Never changed."}`;
  const held = {};
  for (const { statistics } of rows) {
    for (const target of statistics?.targets ?? []) {
      if (target.is_lost) continue;
      for (const [name, { blocks, bytes }] of Object.entries(target.classes ?? {})) {
        held[name] ??= { blocks: 0, bytes: 0 };
        held[name].blocks += blocks ?? 0;
        held[name].bytes += bytes ?? 0;
      }
    }
  }
  const ttl = policy.ttl_s ?? {};
  const names = [...new Set([...Object.keys(ttl), ...Object.keys(held)])].sort();
  $("policy").tBodies[0].replaceChildren(...names.map((name) => make("tr", {},
    make("th", { scope: "row" }, name),
    number(name in ttl ? formatSpan(ttl[name]) : `${formatSpan(ttl.chat)} (as chat)`),
    number(formatCount(held[name]?.blocks ?? 0)), number(formatBytes(held[name]?.bytes ?? 0)))));
}

function showEvents(events) {
  const rows = events.toReversed().map(({ at_s: at, kind, ...values }) => make("tr", {},
    make("td", {}, formatTime(at, true)), make("td", {}, String(kind).replaceAll("_", " ")),
    make("td", { class: "wide" }, Object.entries(values).map(describeValue).join(", "))));
  const none = make("tr", {}, make("td", { colspan: "3" }, "Nothing yet since it started."));
  $("events").tBodies[0].replaceChildren(...(rows.length ? rows : [none]));
}

// A field of an event in words, by the unit that its name ends in.
function describeValue([name, value]) {
  const words = name.replace(/_(s|bytes)$/, "").replaceAll("_", " ");
  return `${words} ${valueText(name, value)}`;
}

function valueText(name, value) {
  if (value !== null && typeof value === "object") {
    return `(${Object.entries(value).map(describeValue).join(", ")})`;
  }
  if (!isNumber(value)) return String(value).replaceAll("_", " ");
  if (name.endsWith("_bytes")) return formatBytes(value);
  if (name.endsWith("_s")) return formatSpan(value);
  return name === "fill" ? formatShare(value) : formatCount(value);
}
