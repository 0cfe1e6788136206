// Figures for people, word for word as outlast's terminal writes them (outlast.observe.format_s and its like).
function digits3(value) {
  return Number(value.toPrecision(3)).toString();
}

export function seconds(value) {
  if (value < 0.9995) return `${Math.round(value * 1e3)} ms`;
  if (value < 59.95) return `${digits3(value)} s`;
  const whole = Math.round(value);
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function clock(value) {
  return value < 3600 ? `${value.toFixed(3)} s` : seconds(value);
}

export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

export function percent(share) {
  return `${(share * 100).toFixed(1)}%`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${digits3(value)} ${units[unit]}`;
}
