// Pictures on canvas: curves, stacks, marks, the grid of members. Colours are the style sheet's.
import { count, number, seconds } from "./format.js";

function begin(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  const style = getComputedStyle(document.documentElement);
  return { pen, width, height, colour: (name) => style.getPropertyValue(name).trim() };
}

export function curve(canvas, { rows }) {
  const [steps, mean, low, high] = [0, 1, 2, 3].map((place) => rows.map((row) => row[place]));
  const height = canvas.clientHeight || 180;
  const { pen, width, colour } = begin(canvas, height);
  const finite = mean.filter((value) => value !== null);
  if (!finite.length) return "No losses yet.";
  const lows = low.filter((value) => value !== null), highs = high.filter((value) => value !== null);
  let bottom = Math.min(...lows), top = Math.max(...highs);
  const log = bottom > 0 && top >= 1e3 * bottom;
  const scale = (value) => (log ? Math.log10(value) : value);
  const [floor, ceiling] = [scale(bottom), scale(top)];
  const left = 56, under = 18;
  const x = (index) => left + ((steps[index] - steps[0]) / Math.max(1, steps.at(-1) - steps[0])) * (width - left - 4);
  const y = (value) => 6 + (1 - (scale(value) - floor) / (ceiling - floor || 1)) * (height - under - 10);
  pen.fillStyle = colour("--soft");
  pen.fillText(number(top), 0, 14);
  pen.fillText(number(bottom), 0, height - under);
  pen.fillText(count(steps[0]), left, height - 3);
  const last = `step ${count(steps.at(-1))}`;
  pen.fillText(last, width - pen.measureText(last).width - 2, height - 3);
  pen.globalAlpha = 0.25;
  pen.fillStyle = colour("--j");
  mean.forEach((value, index) => { if (value !== null) pen.fillRect(x(index) - 0.5, y(high[index]), 1.5, Math.max(1, y(low[index]) - y(high[index]))); });
  pen.globalAlpha = 1;
  pen.strokeStyle = colour("--j");
  pen.lineWidth = 1.6;
  pen.beginPath();
  let drawn = false;
  mean.forEach((value, index) => {
    if (value === null) { drawn = false; return; }
    pen[drawn ? "lineTo" : "moveTo"](x(index), y(value));
    drawn = true;
  });
  pen.stroke();
  const bad = mean.length - finite.length;
  return `${log ? "Logarithmic scale; " : ""}line: mean, shade: lowest to highest of neighbours${bad ? `; ${bad} points are not finite` : ""}.`;
}

export function stack(canvas, { width_s, uses, rows }) {
  const steps = rows.map((row) => row[0]);
  const height = canvas.clientHeight || 180;
  const { pen, width, colour } = begin(canvas, height);
  if (!steps.length) return "No steps yet.";
  const under = 18, left = 56, inner = width - left - 4, column = inner / steps.length;
  const share = 40, room = height - under - share - 12;
  steps.forEach((_, index) => {
    let at = height - under - share;
    const sum = uses.reduce((total, __, use) => total + rows[index][1 + use], 0);
    uses.forEach((use, number) => {
      const part = sum > 0 ? (rows[index][1 + number] / sum) * share : 0;
      pen.fillStyle = colour(`--${use}`);
      const from = Math.floor(left + index * column); // whole pixels: what overlaps would stripe the picture
      pen.fillRect(from, at, Math.floor(left + (index + 1) * column) - from, part);
      at += part;
    });
  });
  const rates = steps.map((number) => number / width_s);
  const top = Math.max(...rates) || 1;
  pen.strokeStyle = colour("--ink");
  pen.lineWidth = 1.4;
  pen.beginPath();
  rates.forEach((rate, index) => pen[index ? "lineTo" : "moveTo"](left + (index + 0.5) * column, 6 + (1 - rate / top) * room));
  pen.stroke();
  pen.fillStyle = colour("--soft");
  pen.fillText(`${number(top, 3)}/s`, 0, 14);
  pen.fillText("use", 0, height - under - share / 2 + 4);
  pen.fillText("start", left, height - 3);
  const last = `+${seconds(steps.length * width_s)}`;
  pen.fillText(last, width - pen.measureText(last).width - 2, height - 3);
  return `Each column is ${seconds(width_s)}; below, what its steps took by use.`;
}

const LANES = ["failure", "verdict", "view", "member", "checkpoint", "run"];

export function marks(canvas, { end_s, bins, marks: found }, at) {
  const height = canvas.clientHeight || 114;
  const { pen, width, colour } = begin(canvas, height);
  const left = 76, under = 18, inner = width - left - 4, lane = (height - under) / LANES.length;
  pen.fillStyle = colour("--soft");
  LANES.forEach((name, index) => pen.fillText(name, 0, index * lane + lane * 0.72));
  pen.fillText("start", left, height - 3);
  const last = `+${seconds(end_s)}`;
  pen.fillText(last, width - pen.measureText(last).width - 2, height - 3);
  for (const [column, category, number, level] of found) {
    pen.fillStyle = colour(["--j", "--u", "--x"][level]);
    const size = Math.min(lane - 3, 5 + 2 * Math.log2(number));
    const y = LANES.indexOf(category) * lane + (lane - size) / 2;
    pen.fillRect(left + (column / bins) * inner, y, Math.max(2.5, inner / bins), size);
  }
  if (Number.isFinite(at) && at > 0 && end_s > 0) {
    pen.fillStyle = colour("--ink");
    pen.fillRect(left + (Math.min(at, end_s) / end_s) * inner, 0, 1.5, height - under);
  }
}

// Black or white, whichever stands out from this colour, "#rrggbb" (WCAG 2.2's contrast).
function over(ground) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(ground.slice(at, at + 2), 16) / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

export function grid(canvas, hosts) {
  const number = hosts.reduce((sum, host) => sum + host.members.length, 0);
  const size = number <= 16 ? 34 : number <= 128 ? 22 : number <= 1500 ? 12 : 7;
  const gap = size > 10 ? 2 : 1;
  const width = Math.max(60, canvas.clientWidth);
  const cells = [];
  let x = 0, y = 0;
  for (const host of hosts) {
    const own = host.members.length * (size + gap);
    if (x > 0 && x + Math.min(own, width) > width) { x = 0; y += size + gap; }
    for (const member of host.members) {
      if (x + size > width) { x = 0; y += size + gap; }
      cells.push({ x, y, size, member, agent: host.agent });
      x += size + gap;
    }
    x += size > 10 ? 10 : 3;
  }
  const height = y + size + 2;
  canvas.style.height = `${height}px`;
  const { pen, colour } = begin(canvas, height);
  for (const cell of cells) {
    pen.fillStyle = colour(`--${cell.member[1]}`);
    pen.fillRect(cell.x, cell.y, size, size);
    if (size >= 22) {
      pen.fillStyle = over(colour(`--${cell.member[1]}`));
      pen.fillText(cell.member[0].split(".")[0], cell.x + 2, cell.y + size / 2 + 4, size - 4);
    }
  }
  return cells;
}

export function anatomy(canvas, members, parts) {
  const row = 18;
  canvas.style.height = `${Math.max(1, members.length) * row}px`;
  const { pen, width, colour } = begin(canvas, Math.max(1, members.length) * row);
  const left = 56, longest = Math.max(...members.map((member) => parts.reduce((sum, part) => sum + member[`${part}_s`], 0)), 0) || 1;
  members.forEach((member, index) => {
    pen.fillStyle = colour("--soft");
    pen.fillText(member.replica, 0, index * row + 13, left - 4);
    let x = left;
    for (const part of parts) {
      const size = (member[`${part}_s`] / longest) * (width - left - 2);
      pen.fillStyle = colour(`--${part}`);
      pen.fillRect(x, index * row + 2, size, row - 5);
      x += size;
    }
  });
}
