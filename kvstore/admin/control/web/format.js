// Numbers as people read them. Nothing here touches the page.

export const NONE = "–";

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const BINARY_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const SPANS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function formatCount(value) {
  return isNumber(value) ? COUNT.format(value) : NONE;
}

export function formatShare(value) {
  if (!isNumber(value)) return NONE;
  const percent = value * 100;
  // 100.0 % means all of them, and not nearly all.
  const shown = percent < 100 ? Math.min(percent, 99.9) : 100;
  return `${shown.toFixed(1)} %`;
}

export function formatBytes(value) {
  if (!isNumber(value)) return NONE;
  let unit = 0;
  while (value >= 1024 && unit < BINARY_UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${BINARY_UNITS[unit]}`;
}

export function formatSpan(seconds) {
  if (!isNumber(seconds)) return NONE;
  for (const [index, [name, length]] of SPANS.entries()) {
    if (seconds < length && name !== "s") continue;
    const whole = Math.floor(seconds / length);
    const next = SPANS[index + 1];
    const rest = next ? Math.floor((seconds - whole * length) / next[1]) : 0;
    return rest ? `${whole} ${name} ${rest} ${next[0]}` : `${whole} ${name}`;
  }
  return NONE;
}

export function formatTime(unixSeconds, withDate = false) {
  if (!isNumber(unixSeconds)) return NONE;
  const at = new Date(unixSeconds * 1000);
  const time = at.toLocaleTimeString("en-GB");
  return withDate ? `${at.toLocaleDateString("en-CA")} ${time}` : time;
}

export function plural(count, one, many) {
  return `${formatCount(count)} ${count === 1 ? one : many}`;
}
