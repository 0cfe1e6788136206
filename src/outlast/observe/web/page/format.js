// Figures for people, word for word as outlast's terminal writes them: outlast/observe/rounding.py, which a test holds
// this file to. Halves go to the even digit, as Python has it; JavaScript's own formatting takes them up.

// `text`: `value` in so few digits; `exact`: in as many as there are. Of a half that went up to an odd digit, the even one.
function even(text, exact) {
  const kept = text.replace(/\D/g, "").length;
  const half = /^50*$/.test(exact.replace(/\D/g, "").slice(kept));
  return half && "13579".includes(text.at(-1)) ? text.slice(0, -1) + (Number(text.at(-1)) - 1) : text;
}

function fixed(value, places) { return even(value.toFixed(places), value.toFixed(100)); }

function bare(text) { return text.includes(".") ? text.replace(/\.?0+$/, "") : text; }

export function number(value, digits = 4) {
  if (value === 0) return "0";
  const [text, power] = value.toExponential(digits - 1).split("e");
  const mantissa = even(text, value.toExponential(100).split("e")[0]), at = Number(power);
  if (at < -4 || at >= digits) return `${bare(mantissa)}e${at < 0 ? "-" : "+"}${String(Math.abs(at)).padStart(2, "0")}`;
  return bare(Number(`${mantissa}e${at}`).toFixed(digits - 1 - at));
}

export function seconds(value) {
  if (value < 0.9995) return `${fixed(value * 1e3, 0)} ms`;
  if (value < 59.95) return `${number(value, 3)} s`;
  const whole = Number(fixed(value, 0));
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function clock(value) {
  return value < 3600 ? `${fixed(value, 3)} s` : seconds(value);
}

export function count(value) {
  return Number(fixed(value, 0)).toLocaleString("en-US");
}

export function percent(share) {
  return `${fixed(share * 100, 1)}%`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value >= 999.5 ? fixed(value, 0) : number(value, 3)} ${units[unit]}`;
}
