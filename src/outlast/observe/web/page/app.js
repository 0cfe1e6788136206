// The page: follows each run by server-sent events, and draws its parts. Text goes in as text, never as HTML, since
// details and commands come from whoever started the run. Figures are formatted as outlast's terminal does.
import { seconds, bytes, count, number, percent, clock } from "./format.js";
import { curve, stack, marks, grid, anatomy } from "./draw.js";

const main = document.querySelector("#runs");
const SHOWS = ["story", "all", "failure", "view", "member", "checkpoint", "verdict"];
let ASKS = {};
const ASKED = { save: "Save now", stop: "Save and stop", evict: "Evict", drain: "Drain", undrain: "Undrain", scale: "Scale" };
let typedKey = ""; // what a person typed; kept nowhere else
const PARTS = ["load", "compute", "exchange", "wait"];
const MOST_HOSTS = 200; // rows; who is lost comes first
const OVER = ["finished", "failed", "stopped", "lost"];
const USES = ["productive", "degraded", "checkpoint", "recovery", "lost", "stalled", "idle", "unexplained"];

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function place() {
  const asked = new URLSearchParams(location.hash.slice(1));
  return { runs: (asked.get("runs") || "").split(",").filter(Boolean), t: asked.get("t"), show: asked.get("show") };
}

function go(changes) {
  const now = place();
  const asked = new URLSearchParams();
  const next = { runs: now.runs.join(","), t: now.t, show: now.show, ...changes };
  for (const [key, value] of Object.entries(next)) if (value) asked.set(key, value);
  location.hash = asked.toString();
}

class Run {
  constructor(name) {
    this.name = name;
    this.parts = {};
    this.fresh = new Set(); // parts that came since they were last drawn
    this.first = 0;
    this.root = el("section", { class: "run", "aria-label": `run ${name}` });
    this.build();
    this.follow();
  }

  // A named group, not a landmark: fifteen of them a run, and the same ones in the run beside it, would hide the run.
  card(where, title, ...content) {
    const card = el("div", { class: "card", role: "group", "aria-label": title }, el("h2", {}, title), ...content);
    this.place(card);
    where.append(card);
    return card;
  }

  // Two runs side by side share rows, so that like stands beside like, whatever is hidden in one of them.
  place(card) { card.style.setProperty("--row", (this.rows = (this.rows ?? 0) + 1)); }

  canvas(label, height) {
    const node = el("canvas", { role: "img", "aria-label": label, tabindex: 0 });
    node.style.height = `${height}px`;
    return node;
  }

  table(label, heads, body) {
    return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label },
      el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((name) => el("th", { scope: "col" }, name)))), body));
  }

  ask(wish, about) {
    const what = about ? (prompt(`${ASKED[wish]}: which ${about}?`, this.chosen?.[about] ?? "") || "").trim() : "";
    if (about && !what) return;
    if (!confirm(`${ASKED[wish]}${what ? ` ${what}` : ""}, in the run ${this.name}?`)) return;
    typedKey ||= prompt("The key that outlast serve --actions printed") || "";
    fetch(`api/runs/${encodeURIComponent(this.name)}/ask/${wish}`, {
      method: "POST", headers: { "content-type": "application/json", "x-outlast-key": typedKey }, body: JSON.stringify({ sure: true, what }),
    }).then(async (answer) => {
      if (answer.status === 403) typedKey = "";
      this.answer.textContent = (await answer.text()).trim();
    }, () => { this.answer.textContent = "no answer"; });
  }

  build() {
    this.top = el("div", { class: "card", role: "group", "aria-label": "state" });
    const [wide, left, right] = ["wide", "column", "column"].map((name) => el("div", { class: name }));
    this.root.append(wide, left, right);
    this.place(this.top);
    wide.append(this.top);
    if (Object.keys(ASKS).length) {
      this.answer = el("p", { class: "soft", role: "status" });
      this.asks = this.card(wide, "Ask the run", el("div", { class: "chips" }, ...Object.entries(ASKS).map(([wish, about]) =>
        el("button", { type: "button", onclick: () => this.ask(wish, about) }, (ASKED[wish] || wish).toLowerCase()))), this.answer);
    }
    this.strip = this.canvas("When things happened, by kind", 114);
    this.strip.addEventListener("click", (event) => {
      const box = this.strip.getBoundingClientRect();
      go({ t: (((event.clientX - box.left) / box.width) * this.parts.marks.end_s).toFixed(1) });
    });
    this.chips = el("div", { class: "chips", role: "group", "aria-label": "What is listed" });
    for (const show of SHOWS) {
      this.chips.append(el("button", { type: "button", "data-show": show, onclick: () => go({ show, t: null }) }, show));
    }
    this.body = el("tbody");
    const head = el("thead", {}, el("tr", {}, ...["when", "noticed by", "after", "recomputed", "downtime", "what"].map((name) => el("th", { scope: "col" }, name))));
    this.older = el("button", { type: "button", onclick: () => this.page(-100) }, "older");
    this.newer = el("button", { type: "button", onclick: () => this.page(100) }, "newer");
    this.shown = el("span", { class: "soft" });
    this.card(wide, "What happened", this.strip, this.chips,
      el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "timeline" }, el("table", { class: "rows" }, head, this.body)),
      el("div", { class: "chips" }, this.older, this.newer, this.shown));
    this.advice = el("ul");
    this.card(left, "What to do next", this.advice);
    this.people = this.canvas("Members by agent and state", 60);
    this.legend = el("p", { class: "soft" });
    this.pointed = el("p", { class: "soft", role: "status" }, "Point at a member, or use the arrow keys, to see who it is.");
    this.card(left, "Members", el("div", { class: "scroll" }, this.people), this.legend, this.pointed);
    this.hosts = el("tbody");
    this.hostsNote = el("p", { class: "soft" });
    this.hostsCard = this.card(left, "Hosts", this.table("hosts", ["host", "agent", "address", "members", "notes"], this.hosts), this.hostsNote);
    this.bar = el("div", { class: "bar", role: "img", "aria-label": "no time yet" });
    this.uses = el("tbody");
    this.card(left, "Where the time went", this.bar, el("table", {}, this.uses));
    this.clocks = el("tbody");
    this.card(left, "Clocks", this.table("clocks", ["clock", "seen", "mean time between", "95 % interval"], this.clocks));
    this.ladder = el("tbody");
    this.ladderNote = el("p", { class: "soft" });
    this.ladderTable = this.table("checkpoints", ["step", "age", "durable after", "held up", "size", "notes"], this.ladder);
    this.card(left, "Checkpoints", this.ladderNote, this.ladderTable);
    this.suspects = el("ul");
    this.card(left, "Audits and suspects", this.suspects);
    this.devices = el("ul");
    this.alarms = el("p");
    this.card(left, "Alarms and devices", this.alarms, this.devices);
    this.loss = this.canvas("Loss over steps", 180);
    this.lossNote = el("p", { class: "soft" });
    this.card(right, "Loss", this.loss, this.lossNote);
    this.rate = this.canvas("Steps a second over time, and what the time was used for", 180);
    this.rateNote = el("p", { class: "soft" });
    this.card(right, "Steps a second, and use of time", this.rate, this.rateNote);
    this.parting = this.canvas("A step's time by member: load, compute, exchange, wait", 60);
    this.partRows = el("tbody");
    this.partNotes = el("ul");
    this.partLegend = el("p", { class: "soft" }, ...PARTS.flatMap((part) => [key(`--${part}`), `${part}   `]));
    this.card(right, "A step, by member", this.parting, this.partLegend,
      this.table("a step by member", ["member", "steps", "share", ...PARTS, "waits most for"], this.partRows), this.partNotes);
    this.plan = el("div");
    this.planCard = this.card(right, "Beside the plan", this.plan);
    this.planCard.hidden = true;
    // Pictures depend on the width alone; the height changes with every list, and drawing ten thousand members takes time.
    this.observer = new ResizeObserver(([{ contentRect: { width } }]) => {
      if (width !== this.width) this.draw();
      this.width = width;
    });
    this.observer.observe(this.root);
    this.people.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.people.addEventListener("keydown", (event) => this.move(event));
  }

  follow() { // only while somebody looks: a browser has six connections to a server, for all of its tabs
    if (this.stream || document.hidden) return;
    this.stream = new EventSource(`api/runs/${encodeURIComponent(this.name)}/stream`);
    for (const part of ["absent", "head", "members", "curves", "marks", "story", "plan"]) {
      this.stream.addEventListener(part, (event) => {
        if (part === "head") delete this.parts.absent;
        const said = JSON.parse(event.data);
        this.parts[part] = part === "curves" ? grown(this.parts.curves, said) : said;
        this.fresh.add(part);
        this.pending ||= requestAnimationFrame(() => { this.pending = 0; this.draw(this.fresh); });
        if (part === "marks") this.list(this.paged ? this.first : undefined);
      });
    }
    this.stream.onopen = () => this.linked();
    this.stream.onerror = () => link("no answer; the last picture is shown. outlast serve shows it again");
  }

  linked() {
    const over = (run) => OVER.includes(run.parts.head?.status.state);
    link(open.length && open.every(over) ? (open.length > 1 ? "these runs are over" : "this run is over") : "live");
  }

  rest() { this.stream?.close(); this.stream = null; }

  close() { this.rest(); this.observer.disconnect(); this.root.remove(); }

  page(by) { this.paged = true; this.first = Math.max(0, this.first + by); this.list(this.first); }

  async list(first) {
    const { t, show } = place();
    const asked = new URLSearchParams({ show: show || "story", limit: "100" });
    if (first !== undefined) asked.set("first", first);
    else if (t) asked.set("near", t);
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const answer = await fetch(`api/runs/${encodeURIComponent(this.name)}/rows?${asked}`).catch(() => null);
    if (!answer || !answer.ok) return;
    const { total, first: from, rows } = await answer.json();
    if (turn !== this.turn) return; // something else was asked for meanwhile
    const scroll = this.body.closest(".scroll");
    const [was, below] = [scroll.scrollTop, scroll.scrollHeight - scroll.clientHeight - scroll.scrollTop];
    const anew = this.listed !== asked.toString();
    this.first = from;
    this.listed = asked.toString();
    for (const chip of this.chips.children) chip.setAttribute("aria-pressed", String(chip.dataset.show === (show || "story")));
    const nearest = t ? rows.reduce((best, row) => (Math.abs(row.since_s - t) < Math.abs((best?.since_s ?? 1e18) - t) ? row : best), null) : null;
    this.body.replaceChildren(...rows.map((row) => el("tr", { class: `${row.level}${row === nearest ? " here" : ""}` },
      el("td", { class: "n" }, el("a", { href: `#${new URLSearchParams({ runs: place().runs.join(","), show: show || "story", t: row.since_s.toFixed(3) })}` }, `+${clock(row.since_s)}`)),
      el("td", { class: "n", "data-name": "by" }, row.noticed_by || ""),
      el("td", { class: "n", "data-name": "after" }, row.detect_s === null ? "" : seconds(row.detect_s)),
      el("td", { class: "n", "data-name": "recomputed" }, row.microbatches_recomputed === null ? "" : String(row.microbatches_recomputed)),
      el("td", { class: "n", "data-name": "downtime" }, row.downtime_s === null ? "" : seconds(row.downtime_s)),
      el("td", { class: "what" }, row.what))));
    this.shown.textContent = total ? `${count(from + 1)} to ${count(from + rows.length)} of ${count(total)}` : "nothing of this kind";
    this.older.disabled = from === 0;
    this.newer.disabled = from + rows.length >= total;
    const here = this.body.querySelector(".here");
    // Who reads on is left where they are; who stands at the end is shown what is new.
    if (anew) scroll.scrollTop = here ? here.offsetTop - 60 : first === undefined ? scroll.scrollHeight : 0;
    else scroll.scrollTop = !here && first === undefined && below < 8 ? scroll.scrollHeight : was;
  }

  // Draws what has come; everything where nothing is said. A second's news of ten thousand members are a few figures.
  draw(fresh = new Set(Object.keys(this.parts))) {
    const { head, members, curves, marks: marked, story, plan, absent } = this.parts;
    const news = (...names) => names.some((name) => fresh.has(name));
    this.fresh = new Set();
    if (absent) {
      this.top.replaceChildren(el("h1", {}, this.name), el("p", {}, absent.trouble || `No journal in ${absent.waiting} yet; this page shows it as soon as there is one.`));
      return;
    }
    if (head && news("head", "story")) this.drawHead(head, story);
    if (marked && news("marks")) marks(this.strip, marked, Number(place().t));
    if (members && news("members")) { this.drawMembers(members); this.drawHosts(members); }
    if (curves && news("curves")) {
      this.lossNote.textContent = curve(this.loss, curves.losses);
      this.rateNote.textContent = stack(this.rate, curves.times);
    }
    if (head && news("head")) this.drawTime(head);
    if (story && news("head", "story")) this.drawLadder(story, head);
    if (story && news("story")) this.drawStory(story);
    if (plan && news("plan")) this.drawPlan(plan);
  }

  drawHead(head, story) {
    const s = head.status;
    const figures = [
      ["step", s.step === null ? "–" : count(s.step) + (s.until ? ` of ${count(s.until)}` : "")],
      ["newest commit", s.step_age_s === null ? "–" : `${seconds(s.step_age_s)} ago`],
      ["a step", s.step_s ? seconds(s.step_s) : "–"],
      ["loss", s.loss === null ? "–" : number(s.loss)],
      ["useful time", percent(head.ettr)],
      ...(head.ettr_95 ? [["useful time, 95 %", head.ettr_95.map(percent).join(" to ")]] : []),
      ["faults outlasted", count(s.num_recoveries)],
      ["downtime", story ? seconds(story.downtime_s) : "–"],
      ["saves", count(head.num_saves) + (s.num_failed_saves ? `, ${count(s.num_failed_saves)} failed` : "")],
      ["wall time", seconds(head.cost.wall_s)],
      ...(head.ranks > 1 ? [["ranks a replica", count(head.ranks)]] : []),
    ];
    if (this.asks) this.asks.hidden = OVER.includes(s.state); // nobody is there to answer
    this.top.replaceChildren(...[
      el("h1", {}, `${this.name} `, s.run_id ? el("span", { class: "soft" }, `${s.run_id} `) : "", el("span", { class: `state ${s.state}` }, s.state)),
      el("p", {}, head.headline),
      head.share_read < 1 ? el("p", { class: "banner", role: "status" }, `Reading the journal, ${percent(head.share_read)}: curves and accounts are not whole yet.`) : null,
      el("dl", { class: "figures" }, ...figures.map(([name, value]) => el("div", { "data-figure": name }, el("dt", {}, name), el("dd", {}, value)))),
      el("p", { class: "soft" }, head.command.join(" ")),
    ].filter(Boolean));
    if (this.stream?.readyState === EventSource.OPEN) this.linked();
    document.title = `${s.state} · ${s.step ?? "–"} · outlast`;
  }

  drawMembers(members) {
    this.cells = grid(this.people, members.hosts);
    this.legend.replaceChildren(...Object.entries(members.codes).filter(([, name]) => members.counts[name]).flatMap(([code, name]) =>
      [key(`--${code}`), `${name} ${count(members.counts[name])}   `]));
  }

  drawHosts(members) {
    const many = members.hosts.length > 1 || members.hosts.some((host) => host.host);
    this.hostsCard.hidden = !many;
    if (!many) return;
    const ordered = members.hosts.map((host, index) => ({ ...host, index })).sort((a, b) => (b.lost ? 1 : 0) - (a.lost ? 1 : 0) || a.index - b.index);
    this.hosts.replaceChildren(...ordered.slice(0, MOST_HOSTS).map((host) => {
      const states = {};
      for (const [, code] of host.members) states[members.codes[code]] = (states[members.codes[code]] || 0) + 1;
      return el("tr", host.lost ? { class: "error" } : {},
        el("td", {}, host.host || "this machine"), el("td", {}, host.agent), el("td", { class: "n" }, host.address || "–"),
        el("td", {}, Object.entries(states).map(([state, number]) => `${count(number)} ${state}`).join(", ") || "none"),
        el("td", { class: "what" }, host.lost ? `lost: ${host.lost}` : host.slots ? `${count(host.slots)} slots` : ""));
    }));
    this.hostsNote.textContent = ordered.length > MOST_HOSTS ? `${count(ordered.length - MOST_HOSTS)} more, all of them heard of.` : "";
  }

  point(x, y) {
    const found = this.cells?.find((cell) => x >= cell.x && x < cell.x + cell.size && y >= cell.y && y < cell.y + cell.size);
    if (found) this.say(found);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !this.cells?.length) return;
    event.preventDefault();
    this.at = ((this.at ?? -1) + step + this.cells.length) % this.cells.length;
    this.say(this.cells[this.at]);
  }

  say(cell) {
    const [name, code, pid, step, said] = cell.member;
    const { step: newest, step_age_s: age } = this.parts.head?.status ?? {};
    const at = step ?? newest, state = this.parts.members.codes[code];
    const detail = state === "stalled" && age != null ? `silent for ${seconds(age)}` : said;
    const where = this.parts.members.hosts.find((host) => host.agent === cell.agent)?.host;
    this.chosen = { replica: name, host: where || cell.agent };
    this.pointed.textContent = `${name} under ${cell.agent}${where ? ` on ${where}` : ""}: ${state}, process ${pid}, step ${at ?? "–"}${detail ? `, ${detail}` : ""}`;
  }

  drawTime(head) {
    const cost = (use) => head.cost[`${use}_s`], wall = cost("wall") || 1;
    this.bar.setAttribute("aria-label", USES.map((use) => `${use} ${percent(cost(use) / wall)}`).join(", "));
    this.bar.replaceChildren(...USES.map((use) => {
      const part = el("span");
      part.style.flexGrow = cost(use) / wall;
      part.style.background = `var(--${use})`;
      return part;
    }));
    this.uses.replaceChildren(...USES.map((use) => el("tr", {}, el("td", {}, key(`--${use}`), use), el("td", { class: "n" }, seconds(cost(use))), el("td", { class: "n" }, percent(cost(use) / wall)))));
    this.clocks.replaceChildren(...head.clocks.map((c) => el("tr", {},
      el("td", {}, el("span", { title: c.meaning }, c.name), el("span", { class: "soft" }, ` ${c.meaning}`)), el("td", { class: "n" }, count(c.count)),
      el("td", { class: "n" }, c.mean_s === null ? "–" : seconds(c.mean_s)),
      el("td", { class: "n" }, `${seconds(c.low_s)} to ${c.high_s === null ? "no bound" : seconds(c.high_s)}`))));
  }

  drawLadder(story, head) {
    const now = head?.status.as_of_s ?? 0;
    this.ladderNote.textContent = story.generations.length ? (story.certified_step === null ? "No audits: nothing is certified." : `Newest certified state: step ${count(story.certified_step)}.`) : "No checkpoint was published.";
    this.ladderTable.hidden = !story.generations.length;
    this.ladder.replaceChildren(...story.generations.map((g) => el("tr", {},
      el("td", { class: "n" }, count(g.step)), el("td", { class: "n" }, seconds(Math.max(0, now - g.at_s))), el("td", { class: "n" }, seconds(g.durable_s)),
      el("td", { class: "n" }, seconds(g.blocked_s)), el("td", { class: "n" }, bytes(g.written_bytes)),
      el("td", {}, [g.certified ? "certified" : "", g.drained_to ? `copied to ${g.drained_to}` : "", g.pruned ? "removed" : "", g.reason].filter(Boolean).join(", ")))));
  }

  drawStory(story) {
    this.suspects.replaceChildren(...(story.suspects.length ? story.suspects.map((row) => el("li", {}, `+${clock(row.since_s)} ${row.what}`)) : [el("li", { class: "soft" }, "Nobody is suspected.")]));
    this.drawAnatomy(story.anatomy);
    this.alarms.textContent = story.alarms ? `${story.alarms}.` : "";
    this.devices.replaceChildren(...(story.device_rows.length ? story.device_rows.map((row) => el("li", {}, `+${clock(row.since_s)} ${row.what}`)) : [el("li", { class: "soft" }, "No alarm, and nothing found about a device.")]));
    this.advice.replaceChildren(...(story.advice.length ? story.advice.map((a) => el("li", {}, `${a.cause} (${a.count}x: ${a.who.slice(0, 8).join(", ")}${a.who.length > 8 ? " …" : ""}): ${a.remedy}`)) : [el("li", { class: "soft" }, "Nothing: no fault is on record.")]));
  }

  drawPlan({ since_s, tables }) {
    this.planCard.hidden = !tables.length;
    this.plan.replaceChildren(el("p", { class: "soft" }, `As of +${clock(since_s)}.`), ...tables.flatMap(({ title, columns, rows, note }) => [
      el("p", {}, title),
      this.table(title, columns, el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell)))))),
      el("p", { class: "soft" }, ...(note ?? "").split("`").map((text, index) => (index % 2 ? el("code", {}, text) : text)))]));
  }

  drawAnatomy({ members, said }) {
    anatomy(this.parting, members, PARTS);
    this.partRows.replaceChildren(...members.map((member) => el("tr", {},
      el("td", {}, member.replica), el("td", { class: "n" }, count(member.steps)), el("td", { class: "n" }, number(member.microbatches, 6)),
      ...PARTS.map((part) => el("td", { class: "n" }, seconds(member[`${part}_s`]))), el("td", {}, member.waits_for))));
    const told = members.length ? said : ["No member has told anything yet."];
    this.partNotes.replaceChildren(...told.map((text) => el("li", members.length ? {} : { class: "soft" }, text)));
  }
}

// Curves, of those that were there and what came: rows from `first` on, which is 0 in a stream's first message.
function grown(had, came) {
  return Object.fromEntries(Object.entries(came).map(([name, { first, rows, ...about }]) => [name, { ...about, rows: first ? [...had[name].rows.slice(0, first), ...rows] : rows }]));
}

function key(name) {
  const node = el("span", { class: "key" });
  node.style.background = `var(${name})`;
  return node;
}

function link(text) { document.querySelector("#link").textContent = text; }

let names = [];
let open = [];

function show() {
  const asked = place().runs.filter((name) => names.includes(name)).slice(0, 2);
  const wanted = asked.length ? asked : names.slice(0, 1);
  if (wanted.join() !== open.map((run) => run.name).join()) {
    for (const run of open) run.close();
    main.replaceChildren();
    open = wanted.map((name) => new Run(name));
    main.append(...open.map((run) => run.root));
    main.classList.toggle("two", open.length > 1);
  } else for (const run of open) { run.paged = false; run.list(); run.draw(); }
  const nav = document.querySelector("#which");
  const way = (runs, more = {}) => el("a", { href: `#${new URLSearchParams({ runs: runs.join(",") })}`, "aria-current": runs.join() === wanted.join() ? "page" : null, ...more }, runs.at(-1));
  const links = names.map((name) => way([name]));
  const [one] = wanted, beside = names.filter((name) => name !== one);
  if (beside.length) links.push(el("span", { class: "soft" }, `${one} beside`), ...beside.map((name) => way([one, name], { "aria-label": `${one} beside ${name}` })));
  const held = nav.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  nav.replaceChildren(...links);
  if (held) links.find((link) => link.getAttribute("href") === held)?.focus(); // who goes on by keyboard is left where they are
}

const served = await (await fetch("api/runs")).json();
names = served.map((run) => run.name);
ASKS = served.length ? served[0].asks : {};
addEventListener("hashchange", show);
addEventListener("pagehide", () => open.forEach((run) => run.rest()));
addEventListener("pageshow", () => open.forEach((run) => run.follow()));
addEventListener("visibilitychange", () => open.forEach((run) => (document.hidden ? run.rest() : run.follow())));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => open.forEach((run) => run.draw()));
show();
