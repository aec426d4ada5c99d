// Draws the data that page_data.cpp wrote into the element #data. Text from the run only becomes text nodes and
// attributes, never HTML. Linkable state is in the address: #rank=5&search=qkv.
'use strict';
(() => {
const data = JSON.parse(document.getElementById('data').textContent);
const text = index => (index < 0 ? '' : data.strings[index]);
const STATES = ['born', 'candidate', 'silent', 'received', 'reduced', 'unknown', 'clean'];
const LETTERS = ['B', '?', 'S', 'R', 'r', '\u2013', 'C'];
/// Only in these phases does a later place in a column mean a later time.
const CROSSING_PHASES = ['forward', 'loss', 'backward'];
const AXES = ['tp', 'cp', 'dp', 'pp', 'ep'];  // the order of ranks.places

// ---- elements ----

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : String(value));
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}
const make = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
const byId = id => document.getElementById(id);
const count = (number, noun, several = `${noun}s`) => `${number.toLocaleString('en')} ${number === 1 ? noun : several}`;

function show(section) {
  byId(section).hidden = false;
  const link = document.querySelector(`nav a[href="#${section}"]`);
  if (link) link.hidden = false;
}

/// Allows line breaks after the dots of names.
const breakable = name => name.split(/(?<=\.)(?=[^\d])/).flatMap((part, i) => i > 0 ? [make('wbr'), part] : [part]);

let announcement = 0;
function announce(message) {
  clearTimeout(announcement);
  announcement = setTimeout(() => { byId('announcer').textContent = message; }, 150);
}

// ---- numbers ----

function numberText(value) {
  if (value === null) return '\u2013';
  if (typeof value === 'string') return {nan: 'NaN', inf: '+Inf', '-inf': '\u2212Inf'}[value] || value;
  if (value === 0) return '0';
  const magnitude = Math.abs(value);
  const digits = magnitude >= 1e5 || magnitude < 1e-3 ? value.toExponential(3) : String(+value.toPrecision(5));
  return digits.replace('-', '\u2212');
}

/// "[17, 3]" from a flat index and "[192, 128]".
function elementText(flat, shapeText) {
  if (flat < 0) return '';
  const shape = shapeText.slice(1, -1).split(', ').filter(Boolean).map(Number);
  if (shape.length < 2) return `[${flat}]`;
  const index = [];
  let rest = flat;
  for (let axis = shape.length - 1; axis >= 0; --axis) {
    index.unshift(shape[axis] > 0 ? rest % shape[axis] : 0);
    rest = shape[axis] > 0 ? Math.floor(rest / shape[axis]) : 0;
  }
  return rest > 0 ? `[${flat}]` : `[${index.join(', ')}]`;
}

// ---- state in the address ----

const address = {
  values: new URLSearchParams(),
  read() {
    const hash = location.hash.slice(1);
    if (!hash.includes('=')) return false;
    this.values = new URLSearchParams(hash);
    return true;
  },
  get(key) { return this.values.get(key) || ''; },
  set(key, value) {
    if (value === '' || value === null) this.values.delete(key);
    else this.values.set(key, value);
    history.replaceState(null, '', `#${this.values}`);
  },
};

// ---- ranks ----

const ranks = {
  number: data.ranks.rank,
  size: data.ranks.rank.length,
  indexOf: new Map(data.ranks.rank.map((rank, index) => [rank, index])),
  silent: new Set(data.ranks.silent),
  along(index, axis) { return data.ranks.places[index * AXES.length + AXES.indexOf(axis)]; },
  isPlaced(index) { return data.ranks.places[index * AXES.length] >= 0; },
  state(index) { return data.ranks.state[index]; },
  place(index) {
    if (!this.isPlaced(index)) return 'place not known';
    const parts = AXES.filter(axis => data.axes[axis] > 1).map(axis => `${axis}${this.along(index, axis)}`);
    return parts.join(' ') || 'the only one';
  },
  name(index) {
    const place = data.ranks.rank.length > 1 ? `, ${this.place(index)}` : '';
    return `rank ${this.number[index]}${place}: ${STATES[this.state(index)]}`;
  },
};
// The index of each rank's first sighting among all sightings in the page.
const firstSighting = [];
data.sightings.shown.reduce((sum, shown, index) => (firstSighting[index] = sum) + shown, 0);

let selectedRank = -1;
const whenRankIsSelected = [];
function selectRank(index, {move = false} = {}) {
  selectedRank = index;
  address.set('rank', index < 0 ? '' : ranks.number[index]);
  showRank(index);
  for (const act of whenRankIsSelected) act(index, move);
}

function term(name, value) {
  return value === '' || value === null ? [] : [make('dt', {}, name), make('dd', {}, value)];
}

function showRank(index) {
  const panel = byId('rank-details');
  panel.hidden = ranks.size === 0;
  panel.replaceChildren();
  if (index < 0) {
    panel.append(make('p', {}, 'Select a rank in the grid for its place, host and sightings.'));
    return;
  }
  const seen = data.ranks.seen[index];
  const facts = make('dl', {});
  for (const axis of AXES) {
    if (data.axes[axis] > 1 && ranks.isPlaced(index))
      facts.append(...term(axis, `${ranks.along(index, axis)} of ${data.axes[axis]}`));
  }
  facts.append(
    ...term('place', ranks.isPlaced(index) ? '' : 'not known'),
    ...term('host', text(data.ranks.host[index])),
    ...term('device', text(data.ranks.device[index])),
    ...term('sightings', seen < 0 ? 'its ledger is not in this folder' : seen.toLocaleString('en')),
    ...term('first', firstSeen(index)),
    ...term('answer', ranks.silent.has(ranks.number[index]) ? 'none: it is silent' : ''),
    ...term('notes', text(data.ranks.notes[index])));
  const drawn = data.microbatches.filter(entry => entry.rank === ranks.number[index]);
  const state = ranks.state(index);
  panel.append(
    make('h3', {}, make('span', {class: `key s${state}`, 'aria-hidden': 'true'}, LETTERS[state]),
      `rank ${ranks.number[index]}: ${STATES[state]}`),
    facts);
  if (drawn.length > 0) {
    const lines = drawn.map(({number, chunk, tensors}) =>
      make('li', {}, `${number}${chunk >= 0 ? ` of chunk ${chunk}` : ''}: ${tensors.join('; ')}`));
    panel.append(make('details', {}, make('summary', {}, `It drew ${count(drawn.length, 'microbatch', 'microbatches')}`),
      make('ul', {}, ...lines)));
  }
  if (seen > 0) {
    panel.append(make('button', {type: 'button', onclick: () => ledgers.showRank(index)}, 'Its sightings'));
  }
}

function firstSeen(index) {
  if (data.sightings.shown[index] === 0) return '';
  const place = data.sightings.place[firstSighting[index]];
  return placeText(place);
}

const places = data.places;
function placeText(place) {
  const microbatch = places.microbatch[place] >= 0 ? ` ${places.microbatch[place]}` : '';
  const what = [text(places.parameter[place]) || text(places.module[place]), text(places.operator[place]),
    text(places.role[place])].filter(Boolean).join(', ');
  return `${data.phases[places.phase[place]]}${microbatch}: ${what}`;
}

/// The axes of rows and of columns, both from the slowest to the fastest.
const LAYOUTS = [
  {name: 'pp by dp, tp', rows: ['pp'], columns: ['dp', 'cp', 'tp']},
  {name: 'dp by pp, tp', rows: ['dp', 'cp'], columns: ['pp', 'tp']},
  {name: 'pp, tp by dp', rows: ['pp', 'tp'], columns: ['dp', 'cp']},
];
const product = axes => axes.reduce((size, axis) => size * data.axes[axis], 1);
const GRID_WIDTH = 1090, GRID_HEIGHT = 900, LARGEST_CELL = 34, SMALLEST_CELL = 5;
function cellSize(rows, columns) {
  const pitch = Math.min(Math.floor(GRID_WIDTH / columns), Math.floor(GRID_HEIGHT / rows));
  return Math.min(LARGEST_CELL, pitch - (pitch < 14 ? 1 : 2));
}
const cellOf = layout => cellSize(product(layout.rows), product(layout.columns));

const grid = {
  cells: [],  // by index of the rank
  rows: [],   // indices; -1 without a rank
  draw() {
    if (ranks.size === 0) return;
    const isGrid = AXES.slice(0, 4).reduce((size, axis) => size * data.axes[axis], 1) <= 4 * ranks.size &&
      ranks.number.some((_, index) => ranks.isPlaced(index));
    const layouts = isGrid ? LAYOUTS.filter(layout => cellOf(layout) >= SMALLEST_CELL) : [];
    const holder = byId('rank-grid');
    holder.hidden = false;
    const choices = [...layouts, {name: 'by number', rows: null}];
    let best = 0;
    layouts.forEach((layout, i) => { if (cellOf(layout) > cellOf(layouts[best])) best = i; });
    const select = make('select', {onchange: () => this.fill(choices[select.selectedIndex])},
      ...choices.map(choice => make('option', {}, choice.name)));
    select.selectedIndex = best;
    this.body = make('div', {class: 'drawing'});
    holder.replaceChildren(
      make('div', {class: 'controls'}, make('label', {}, 'Rows by columns', select),
        make('span', {class: 'tally'}, 'Arrow keys move, Enter selects')),
      this.body);
    this.fill(choices[best]);
    whenRankIsSelected.push((index, move) => this.mark(index, move));
  },
  fill(layout) {
    this.rows = [];
    let headers, rowNames, groupSize = 0;
    const unplaced = [];
    if (layout.rows) {
      const width = product(layout.columns);
      const indexAlong = (index, axes) =>
        axes.reduce((sum, axis) => sum * data.axes[axis] + ranks.along(index, axis), 0);
      for (let i = 0; i < product(layout.rows); ++i) this.rows.push(new Array(width).fill(-1));
      for (let index = 0; index < ranks.size; ++index) {
        const row = ranks.isPlaced(index) && this.rows[indexAlong(index, layout.rows)];
        const column = row ? indexAlong(index, layout.columns) : 0;
        if (row && row[column] === -1) row[column] = index;
        else unplaced.push(index);
      }
      groupSize = product(layout.columns.slice(1));
      headers = [];
      for (let group = 0; group < data.axes[layout.columns[0]]; ++group)
        headers.push(`${layout.columns[0]} ${group}`);
      rowNames = this.rows.map((_, row) => this.rowName(layout.rows, row));
      if (unplaced.length > 0) {
        for (let start = 0; start < unplaced.length; start += width) {
          this.rows.push(unplaced.slice(start, start + width));
          rowNames.push('not placed');
        }
      }
    } else {
      const width = ranks.size <= 64 ? 16 : 2 ** Math.ceil(Math.log2(Math.sqrt(2 * ranks.size)));
      for (let start = 0; start < ranks.size; start += width) {
        this.rows.push(Array.from({length: Math.min(width, ranks.size - start)}, (_, i) => start + i));
      }
      rowNames = this.rows.map(row => String(ranks.number[row[0]]));
    }
    this.table(headers, rowNames, groupSize);
  },
  rowName(axes, row) {
    const parts = [];
    for (const axis of [...axes].reverse()) {
      if (data.axes[axis] > 1 || axis === axes[0]) parts.unshift(`${axis} ${row % data.axes[axis]}`);
      row = Math.floor(row / data.axes[axis]);
    }
    return parts.join(' ');
  },
  table(headers, rowNames, groupSize) {
    const width = Math.max(...this.rows.map(row => row.length));
    const cell = Math.max(SMALLEST_CELL, cellSize(this.rows.length, width));
    const isTight = cell < 12;
    const table = make('table', {class: isTight ? 'ranks-table tight' : 'ranks-table', role: 'grid',
      'aria-label': `${count(ranks.size, 'rank')} by place`});
    table.style.setProperty('--cell', `${cell}px`);
    if (headers && groupSize > 0) {
      const names = isTight && headers.length > 16 ? headers.map((name, i) => i % 8 === 0 ? name : '') : headers;
      const isShort = cell * groupSize < 34;
      table.append(make('thead', {}, make('tr', {}, make('td', {}), ...names.map((name, group) =>
        make('th', {scope: 'colgroup', colspan: groupSize, class: group > 0 && groupSize > 1 ? 'group-start' : null},
          isShort && !isTight ? name.split(' ')[1] : isTight && groupSize * cell < 40 && group % 8 !== 0 ? '' : name)))));
    }
    this.cells = [];
    const body = make('tbody', {});
    this.rows.forEach((row, y) => {
      const line = make('tr', {}, make('th', {scope: 'row'}, make('span', {}, rowNames[y])));
      row.forEach((index, x) => {
        const starts = groupSize > 1 && x > 0 && x % groupSize === 0 ? ' group-start' : '';
        if (index < 0) return line.append(make('td', {class: `absent${starts}`}));
        const state = ranks.state(index);
        const node = make('td', {class: `rank s${state} ${STATES[state]}${starts}`, role: 'gridcell',
          id: `rank-${ranks.number[index]}`, tabindex: -1, title: ranks.name(index),
          'aria-label': ranks.name(index), 'aria-selected': 'false'}, LETTERS[state]);
        node.dataset.index = index;
        node.dataset.row = y;
        node.dataset.column = x;
        this.cells[index] = node;
        line.append(node);
      });
      body.append(line);
    });
    table.append(body);
    // A small grid is placed beside the selected rank.
    const isSmall = width * (cell + 3) < 560;
    if (isSmall) byId('rank-summary').append(byId('rank-grid'));
    else byId('ranks').append(byId('rank-grid'));
    table.addEventListener('click', event => this.choose(event.target));
    table.addEventListener('keydown', event => this.key(event));
    this.body.replaceChildren(table);
    this.mark(selectedRank, false);
    if (!this.current) this.enter(this.cells.find(Boolean));
  },
  choose(node) {
    if (node.dataset && node.dataset.index) selectRank(Number(node.dataset.index));
  },
  enter(node) {  // the only cell in the Tab order
    if (this.current) this.current.tabIndex = -1;
    this.current = node;
    if (node) node.tabIndex = 0;
  },
  key(event) {
    const at = event.target.dataset;
    if (!at || at.index === undefined) return;
    if (event.key === 'Enter' || event.key === ' ') {
      event.preventDefault();
      return this.choose(event.target);
    }
    const step = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
      Home: [0, -Infinity], End: [0, Infinity]}[event.key];
    if (!step) return;
    event.preventDefault();
    const row = this.rows[Math.min(this.rows.length - 1, Math.max(0, Number(at.row) + step[0]))];
    let column = Math.min(row.length - 1, Math.max(0, Number(at.column) + step[1]));
    while (column > 0 && row[column] < 0) --column;
    if (!(row[column] >= 0)) return;
    this.enter(this.cells[row[column]]);
    this.current.focus();
  },
  mark(index, move) {
    for (const node of this.body.querySelectorAll('[aria-selected="true"]')) node.setAttribute('aria-selected', 'false');
    const node = this.cells[index];
    if (!node) return this.enter(this.cells.find(Boolean));
    node.setAttribute('aria-selected', 'true');
    this.enter(node);
    if (move) node.scrollIntoView({block: 'nearest', inline: 'nearest'});
  },
};

// ---- the timeline ----

const timeline = {
  draw() {
    const {columns, rows} = data.timeline;
    if (rows.length === 0 || columns.length === 0) return;
    if (!rows.some(row => row.marks.length > 0) && data.origins.length === 0) return;
    show('timeline');
    this.measure();
    const svg = draw('svg', {width: this.width, height: this.height, viewBox: `0 0 ${this.width} ${this.height}`,
      role: 'img', 'aria-label': 'Bad values by rank and phase; the same is in the table below'});
    this.drawFrame(svg);
    this.layer = draw('g', {});
    this.drawMarks(svg);
    svg.append(this.layer);
    this.drawOrigins(svg);
    const body = byId('timeline-body');
    body.append(make('p', {class: 'intro'}, this.intro()), make('div', {class: 'drawing'}, svg), this.legend(),
      this.asTable());
    whenRankIsSelected.push(index => this.mark(svg, index));
  },
  intro() {
    const {further, columns} = data.timeline;
    let words = 'Origins first, then ranks in the order in which they met it. Within forward and backward, left is earlier.';
    const total = further.reduce((sum, [, number]) => sum + number, 0);
    if (total > 0) {
      const parts = further.map(([column, number]) =>
        `${number.toLocaleString('en')} in ${column < 0 ? 'a later microbatch' : this.columnName(columns[column])}`);
      words += ` ${count(total, 'further rank')} met it first: ${parts.join(', ')}.`;
    }
    return words;
  },
  columnName([phase, microbatch]) {
    return microbatch < 0 ? data.phases[phase] : `${data.phases[phase]} ${microbatch}`;
  },
  measure() {
    const {columns, rows} = data.timeline;
    this.rowHeight = 24;
    this.left = 190;
    this.top = 46;
    const most = columns.map((_, column) => Math.max(0, ...rows.map(row => {
      let marks = 0;
      for (let i = 0; i < row.marks.length; i += 4) marks += row.marks[i] === column;
      return marks;
    })));
    const hasOrigin = columns.map((_, column) => data.origins.some(origin => origin.column === column));
    this.clocks = columns.map((_, column) => {
      const clocks = rows.flatMap(row => row.marks.filter((_, i) => i % 4 === 1 && row.marks[i - 1] === column));
      return clocks.reduce(([low, high], clock) => [Math.min(low, clock), Math.max(high, clock)], [Infinity, -Infinity]);
    });
    this.hasTime = columns.map(([phase]) => CROSSING_PHASES.includes(data.phases[phase]));
    const weights = columns.map((column, i) => {
      const [low, high] = this.clocks[i];
      const time = this.hasTime[i] && high > low ? Math.min(420, 50 + 7 * (high - low)) : 0;
      return Math.max(20, time, Math.min(130, 24 + 13 * most[i]) * (most[i] > 0), hasOrigin[i] ? 50 : 0);
    });
    data.phases.forEach((name, phase) => {  // room for the phase's name
      const own = columns.map((column, i) => column[0] === phase ? i : -1).filter(i => i >= 0);
      const missing = 7.7 * name.length + 14 - own.reduce((sum, i) => sum + weights[i], 0);
      for (const i of own) weights[i] += Math.max(0, missing) / own.length;
    });
    const room = 1140 - this.left;
    const sumOf = numbers => numbers.reduce((a, b) => a + b, 0);
    const excess = sumOf(weights) - room;
    if (excess > 0) {  // the widest columns shrink
      const spare = weights.map(weight => Math.max(0, weight - 100));
      const part = Math.min(1, excess / Math.max(1, sumOf(spare)));
      weights.forEach((weight, i) => { weights[i] = weight - part * spare[i]; });
    }
    const scale = Math.max(1, room / sumOf(weights));
    this.x = [];
    this.columnWidth = weights.map((weight, i) => weight * (most[i] > 0 || scale < 1.2 ? scale : 1.2));
    const rest = room - sumOf(this.columnWidth);
    const wide = most.filter(marks => marks > 0).length;
    this.columnWidth = this.columnWidth.map((width, i) => width + (most[i] > 0 ? Math.max(0, rest) / wide : 0));
    let x = this.left;
    this.columnWidth.forEach((width, i) => { this.x[i] = x; x += width; });
    this.width = Math.ceil(x) + 2;
    this.height = this.top + rows.length * this.rowHeight + 8;
  },
  y(row) { return this.top + row * this.rowHeight + this.rowHeight / 2; },
  position(column, clock) {
    const [low, high] = this.clocks[column];
    const inner = this.columnWidth[column] - 34;
    return this.x[column] + 24 + (high > low ? (clock - low) / (high - low) : 0.3) * Math.max(0, inner);
  },
  drawFrame(svg) {
    const {columns, rows} = data.timeline;
    columns.forEach((column, i) => {
      const isFirst = i === 0 || columns[i - 1][0] !== column[0];
      if (isFirst) {
        svg.append(draw('line', {class: 'rule', x1: this.x[i], x2: this.x[i], y1: 4, y2: this.height - 4}));
        const last = columns.findLastIndex(other => other[0] === column[0]);
        svg.append(draw('text', {x: this.x[i] + 5, y: 17, class: 'strong'}, data.phases[column[0]]),
          draw('title', {}, `${data.phases[column[0]]}: ${last - i + 1}`));
      }
      if (column[1] >= 0) {
        svg.append(draw('text', {x: this.x[i] + this.columnWidth[i] / 2, y: 36, 'text-anchor': 'middle'}, String(column[1])));
      } else if (columns.some((other, j) => j !== i && other[0] === column[0])) {
        svg.append(draw('text', {x: this.x[i] + this.columnWidth[i] / 2, y: 36, 'text-anchor': 'middle'}, 'any'));
      }
    });
    svg.append(draw('text', {x: this.left - 10, y: 36, 'text-anchor': 'end'}, 'rank / microbatch'));
    rows.forEach((row, r) => {
      const state = ranks.state(row.rank);
      svg.append(draw('text', {class: state < 2 ? 'row-label strong' : 'row-label', x: this.left - 10, y: this.y(r) + 4,
        'text-anchor': 'end', onclick: () => selectRank(row.rank, {move: true})},
      `${LETTERS[state]}  ${ranks.number[row.rank]}  ${ranks.place(row.rank)}`.slice(0, 34)));
      columns.forEach((_, i) => {
        svg.append(draw('rect', {class: row.covered[i] ? 'covered' : 'uncovered', x: this.x[i] + 2, rx: 3,
          y: this.y(r) - this.rowHeight / 2 + 2, width: this.columnWidth[i] - 4, height: this.rowHeight - 4}));
      });
    });
    this.selection = draw('rect', {class: 'selected-row', x: 1, width: this.width - 3, height: this.rowHeight, rx: 4, visibility: 'hidden'});
    svg.append(this.selection);
  },
  mark(svg, index) {
    const row = data.timeline.rows.findIndex(entry => entry.rank === index);
    this.selection.setAttribute('visibility', row < 0 ? 'hidden' : 'visible');
    if (row >= 0) this.selection.setAttribute('y', this.y(row) - this.rowHeight / 2);
  },
  drawMarks(svg) {
    const ends = [];  // by row and mark: x
    data.timeline.rows.forEach((row, r) => {
      ends[r] = [];
      const byColumn = new Map();
      for (let i = 0; i < row.marks.length; i += 4) {
        const [column, clock, kind, place] = row.marks.slice(i, i + 4);
        ends[r].push(this.position(column, clock));
        if (!byColumn.has(column)) byColumn.set(column, []);
        byColumn.get(column).push({mark: i / 4, kind, place});
      }
      for (const [column, marks] of byColumn) {
        // The later phases record no crossings: there the order is the rank's own.
        if (!this.hasTime[column])
          marks.forEach(({mark}, i) => { ends[r][mark] = this.x[column] + 24 + 12 * i; });
      }
      for (const [column, marks] of byColumn) this.drawCell(r, column, marks, ends[r]);
    });
    // Arrows by which a rank first met the fault are on top; others are drawn only if they are few.
    const arrows = data.timeline.arrows;
    const later = arrows.filter(arrow => !arrow[4]);
    for (const [fromRow, fromMark, toRow, toMark, isFirst] of [...(later.length <= 24 ? later : []), ...arrows.filter(arrow => arrow[4])]) {
      this.drawArrow(svg, ends[fromRow][fromMark], this.y(fromRow), ends[toRow][toMark], this.y(toRow), isFirst);
    }
  },
  drawCell(row, column, marks, ends) {
    const y = this.y(row);
    const right = this.x[column] + this.columnWidth[column] - 10;
    const room = Math.max(1, Math.floor((this.columnWidth[column] - 30) / 12));
    const spread = [];  // keeps marks from covering each other
    marks.forEach(({mark}, i) => {
      const least = i > 0 ? spread[i - 1] + 12 : -Infinity;
      spread.push(Math.min(Math.max(ends[mark], least), right - 12 * (marks.length - 1 - i)));
    });
    const isInPlace = marks.every(({mark}, i) => Math.abs(spread[i] - ends[mark]) <= 16);
    if (marks.length <= Math.min(room, 12) && (isInPlace || !this.hasTime[column])) {
      marks.forEach(({mark, kind, place}, i) => {
        ends[mark] = spread[i];
        const x = ends[mark];
        const shape = kind === 0 ? draw('circle', {class: 'm0', cx: x, cy: y, r: 4.5})
          : kind === 1 ? draw('polygon', {class: 'm1', points: `${x - 4},${y - 5} ${x + 6},${y} ${x - 4},${y + 5}`})
          : draw('rect', {class: 'm2', x: x - 4, y: y - 4, width: 8, height: 8});
        shape.append(draw('title', {}, placeText(place)));
        this.layer.append(shape);
      });
      return;
    }
    const xs = marks.map(({mark}) => ends[mark]);
    const begin = this.hasTime[column] ? Math.min(Math.min(...xs) - 6, right - 24) : this.x[column] + 18;
    const width = Math.max(24, Math.min(right, Math.max(...xs) + 6) - begin);
    const shown = marks.slice(0, 12).map(({place}) => placeText(place));
    if (marks.length > 12) shown.push(`and ${marks.length - 12} more`);
    this.layer.append(
      draw('rect', {class: 'many', x: begin, y: y - 7, width, height: 14, rx: 4}, draw('title', {}, shown.join('\n'))),
      draw('text', {class: 'count', x: begin + width / 2, y: y + 4, 'text-anchor': 'middle', 'pointer-events': 'none'},
        String(marks.length)));
  },
  drawArrow(svg, x1, y1, x2, y2, isFirst) {
    const suffix = isFirst ? ' first' : '';
    const down = Math.sign(y2 - y1) || 1;
    const endY = y2 - down * 7;
    const bend = Math.max(8, Math.abs(y2 - y1) / 3);
    svg.append(draw('path', {class: `arrow${suffix}`,
      d: `M${x1},${y1 + down * 5} C${x1},${y1 + down * bend} ${x2},${endY - down * bend} ${x2},${endY}`}));
    this.layer.append(draw('polygon', {class: `arrow-head${suffix}`,
      points: `${x2},${endY + down * 3} ${x2 - 3.5},${endY - down * 3} ${x2 + 3.5},${endY - down * 3}`}));
  },
  drawOrigins(svg) {
    data.origins.forEach((origin, number) => {
      if (origin.column < 0) return;
      data.timeline.rows.forEach((row, r) => {
        if (!origin.ranks.includes(ranks.number[row.rank])) return;
        const x = this.x[origin.column] + 12, y = this.y(r);
        svg.append(draw('polygon', {class: 'origin-mark', points: `${x},${y - 9} ${x + 9},${y} ${x},${y + 9} ${x - 9},${y}`},
          draw('title', {}, `origin ${number + 1}: ${origin.cause}`)));
      });
    });
  },
  legend() {
    const icon = node => draw('svg', {width: 20, height: 20, viewBox: '-10 -10 20 20', 'aria-hidden': 'true'}, node);
    return make('ul', {class: 'legend'},
      make('li', {}, icon(draw('polygon', {class: 'origin-mark', points: '0,-8 8,0 0,8 -8,0'})), 'origin'),
      make('li', {}, icon(draw('circle', {class: 'm0', r: 4.5})), 'bad tensor'),
      make('li', {}, icon(draw('polygon', {class: 'm1', points: '-4,-5 6,0 -4,5'})), 'sent bad'),
      make('li', {}, icon(draw('rect', {class: 'm2', x: -4, y: -4, width: 8, height: 8})), 'received bad'),
      make('li', {}, icon(draw('rect', {class: 'many', x: -9, y: -6, width: 18, height: 12, rx: 3})), 'several, counted'),
      make('li', {}, icon(draw('path', {class: 'arrow first', d: 'M-7,-7 L6,6'})), 'how a rank first met it'),
      make('li', {}, icon(draw('rect', {class: 'covered', x: -8, y: -7, width: 16, height: 14})), 'scanned'),
      make('li', {}, icon(draw('rect', {class: 'uncovered', x: -8, y: -7, width: 16, height: 14})), 'not scanned'));
  },
  asTable() {
    const {columns, rows} = data.timeline;
    const lines = rows.map(row => {
      const counts = columns.map(() => 0);
      for (let i = 0; i < row.marks.length; i += 4) ++counts[row.marks[i]];
      return make('tr', {}, make('th', {scope: 'row'}, make('a', {href: `#rank=${ranks.number[row.rank]}`}, ranks.name(row.rank))),
        ...counts.map((number, i) => make('td', {class: 'number'},
          number > 0 ? String(number) : row.covered[i] ? 'clean' : '\u2013')));
    });
    return make('details', {}, make('summary', {}, 'As a table'), make('div', {class: 'scroll', tabindex: 0},
      make('table', {class: 'data'}, make('caption', {class: 'visually-hidden'}, 'Bad tensors by rank and column'),
        make('thead', {}, make('tr', {}, make('th', {scope: 'col'}, 'rank'),
          ...columns.map(column => make('th', {scope: 'col', class: 'number'}, this.columnName(column))))),
        make('tbody', {}, ...lines))));
  },
};

// ---- paged tables ----

/// `columns`: [{name, number}]; `rowOf(item)`: cells, or a row element; `describe(shown, all)`.
function pagedTable(holder, caption, columns, pageSize, rowOf) {
  const body = make('tbody', {});
  const tally = make('span', {class: 'tally', role: 'status'});
  const back = make('button', {type: 'button', onclick: () => turn(-1)}, 'Previous');
  const forth = make('button', {type: 'button', onclick: () => turn(1)}, 'Next');
  const scroll = make('div', {class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption},
    make('table', {class: 'data'}, make('caption', {class: 'visually-hidden'}, caption),
      make('thead', {}, make('tr', {}, ...columns.map(column =>
        make('th', {scope: 'col', class: column.number ? 'number' : null}, column.name)))), body));
  const pager = make('div', {class: 'controls'}, back, forth);
  holder.append(scroll, pager);
  let items = [], page = 0, noun = 'row';
  function turn(by) {
    page += by;
    refresh();
    scroll.scrollTop = 0;
  }
  function refresh() {
    const begin = page * pageSize, end = Math.min(items.length, begin + pageSize);
    body.replaceChildren(...items.slice(begin, end).map(rowOf));
    back.disabled = page === 0;
    forth.disabled = end >= items.length;
    pager.hidden = items.length <= pageSize;
    tally.textContent = items.length === 0 ? `no ${noun}` : items.length <= pageSize ? count(items.length, noun)
      : `${(begin + 1).toLocaleString('en')} to ${end.toLocaleString('en')} of ${count(items.length, noun)}`;
  }
  return {tally, show(newItems, newNoun) { items = newItems; noun = newNoun; page = 0; refresh(); }};
}
const termsOf = query => query.toLowerCase().split(/\s+/).filter(Boolean);

// ---- parameters ----

const parameters = {
  draw() {
    const all = data.parameters;
    if (all.name.length === 0) return;
    show('parameters');
    this.lower = all.name.map(index => text(index).toLowerCase());
    this.isBad = all.name.map((_, i) => all.phases.some(phase => phase.bad[i] > 0));
    this.isOrigin = new Set(data.origins.map(origin => origin.parameter));
    const body = byId('parameters-body');
    this.box = make('input', {type: 'search', id: 'parameter-filter', spellcheck: 'false', autocomplete: 'off',
      oninput: () => { address.set('parameter', this.box.value); this.filter(); }});
    this.which = make('select', {onchange: () => this.filter()}, make('option', {value: 'near'}, 'bad and their neighbours'),
      make('option', {value: 'bad'}, 'bad'), make('option', {value: 'all'}, 'all'));
    if (!this.isBad.includes(true) || all.name.length <= 40) this.which.value = 'all';
    const columns = [{name: '#', number: true}, {name: 'parameter'}, {name: 'shape'}, {name: 'stage', number: true},
      ...all.phases.map(phase => ({name: data.phases[phase.phase]}))];
    const controls = make('div', {class: 'controls'}, make('label', {}, 'Filter', this.box), make('label', {}, 'Show', this.which));
    if (!all.is_order_observed)
      body.append(make('p', {}, 'The order was not observed on every rank: there it is reverse registration order.'));
    const left = all.count - all.name.length;
    if (left > 0) body.append(make('p', {}, `${count(left, 'clean parameter')} left out to keep the page small.`));
    body.append(controls);
    this.table = pagedTable(body, 'Parameters in backward order', columns, 200, item => this.row(item));
    controls.append(this.table.tally);
    this.filter();
  },
  filter() {
    const terms = termsOf(this.box.value);
    const mode = terms.length > 0 && this.which.value === 'near' ? 'all' : this.which.value;
    const isNear = i => this.isBad[i] || this.isBad[i - 1] || this.isBad[i + 1] || this.isBad[i - 2] || this.isBad[i + 2];
    const items = [];
    let skipped = 0, found = 0;
    for (let i = 0; i < this.lower.length; ++i) {
      const isShown = terms.every(word => this.lower[i].includes(word)) &&
        (mode === 'all' || (mode === 'bad' ? this.isBad[i] : isNear(i)));
      if (!isShown) { ++skipped; continue; }
      if (skipped > 0 && mode === 'near') items.push({gap: skipped});
      skipped = 0;
      ++found;
      items.push(i);
    }
    if (skipped > 0 && mode === 'near') items.push({gap: skipped});
    this.table.show(items, 'row');
    announce(count(found, 'parameter'));
  },
  row(item) {
    const all = data.parameters;
    if (item.gap) {
      return make('tr', {class: 'gap'}, make('td', {colspan: 4 + all.phases.length}, `${count(item.gap, 'parameter')} without a bad one near`));
    }
    const name = text(all.name[item]);
    return make('tr', {class: this.isBad[item] ? 'is-bad' : 'is-clean'}, make('td', {class: 'number'}, String(all.position[item] + 1)),
      make('th', {scope: 'row', class: 'name'}, ...breakable(name),
        this.isOrigin.has(all.name[item]) ? make('span', {class: 'mark mark-bad'}, ' \u25c6 origin') : null),
      make('td', {class: 'mono'}, text(all.shape[item])), make('td', {class: 'number'}, String(all.stage[item])),
      ...all.phases.map(phase => {
        const bad = phase.bad[item], covered = Math.max(bad, phase.covered[item]);
        if (covered === 0) return make('td', {class: 'mark mark-unseen'}, '\u2013 not seen');
        if (bad === 0) return make('td', {class: 'mark mark-clean'}, '\u2713 clean');
        return make('td', {class: 'mark mark-bad'}, covered > 1 ? `\u2717 bad on ${bad} of ${covered}` : '\u2717 bad');
      }));
  },
};

// ---- ledgers ----

const ledgers = {
  draw() {
    const {place, left_out: leftOut} = data.sightings;
    if (!data.sightings.shown.some(Boolean)) return;
    show('ledgers');
    this.rankOf = [];
    data.sightings.shown.forEach((shown, index) => { for (let i = 0; i < shown; ++i) this.rankOf.push(index); });
    this.lower = (places.phase || []).map((phase, i) => [data.phases[phase], places.microbatch[i] >= 0 ? `microbatch ${places.microbatch[i]}` : '',
      text(places.module[i]), text(places.operator[i]), text(places.role[i]), text(places.parameter[i]),
      text(places.dtype[i]), text(places.shape[i]), text(places.group[i])].join(' ').toLowerCase());
    const body = byId('ledgers-body');
    this.box = make('input', {type: 'search', id: 'ledger-search', spellcheck: 'false', autocomplete: 'off',
      oninput: () => { address.set('search', this.box.value); this.filter(); }});
    this.only = make('input', {type: 'checkbox', onchange: () => this.filter()});
    this.onlyName = document.createTextNode('only the selected rank');
    const controls = make('div', {class: 'controls'}, make('label', {}, 'Search', this.box), make('label', {}, this.only, this.onlyName));
    let words = `${count(place.length, 'bad tensor')} on ${count(data.sightings.shown.filter(Boolean).length, 'rank')}, in execution order on each.`;
    if (leftOut > 0) words += ` ${count(leftOut, 'later one')} left out to keep the page small; all are in the ledger files.`;
    body.append(make('p', {}, words), controls);
    const columns = [{name: 'rank', number: true}, {name: '#', number: true}, {name: 'phase'}, {name: 'tensor'}, {name: 'role'},
      {name: 'shape'}, {name: 'NaN', number: true}, {name: 'Inf', number: true}, {name: 'first bad'},
      {name: 'max |finite|', number: true}, {name: 'crossing'}];
    this.table = pagedTable(body, 'Sightings', columns, 100, item => this.row(item));
    controls.append(this.table.tally);
    whenRankIsSelected.push(index => {
      this.onlyName.textContent = index < 0 ? 'only the selected rank' : `only rank ${ranks.number[index]}`;
      if (this.only.checked) this.filter();
    });
    this.filter();
  },
  showRank(index) {
    this.only.checked = true;
    selectRank(index);
    this.filter();
    byId('ledgers').scrollIntoView();
    this.box.focus({preventScroll: true});
  },
  filter() {
    const terms = termsOf(this.box.value);
    const isMatch = this.lower.map(line => terms.every(word => line.includes(word)));
    const rank = this.only.checked ? selectedRank : -1;
    const items = [];
    for (let i = 0; i < this.rankOf.length; ++i) {
      if (isMatch[data.sightings.place[i]] && (rank < 0 || this.rankOf[i] === rank)) items.push(i);
    }
    this.table.show(items, 'sighting');
  },
  row(item) {
    const seen = data.sightings, place = seen.place[item], rank = this.rankOf[item];
    const microbatch = places.microbatch[place] >= 0 ? ` ${places.microbatch[place]}` : '';
    const name = text(places.parameter[place]) || text(places.module[place]);
    const operator = text(places.operator[place]);
    const shape = text(places.shape[place]);
    let crossing = '';
    if (places.group[place] >= 0) {
      crossing = `${text(places.group[place])} #${places.sequence[place]}`;
      if (seen.peer[item] !== 0) crossing += ` with rank ${ranks.number[rank] + seen.peer[item]}`;
    }
    return make('tr', {}, make('td', {class: 'number'}, make('a', {href: `#rank=${ranks.number[rank]}`}, String(ranks.number[rank]))),
      make('td', {class: 'number'}, String(item - firstSighting[rank] + 1)),
      make('td', {class: 'mark'}, data.phases[places.phase[place]] + microbatch),
      make('td', {class: 'name'}, ...breakable(name), operator ? make('small', {}, ` ${operator}`) : null),
      make('td', {class: 'mark'}, text(places.role[place])), make('td', {class: 'mark'}, `${text(places.dtype[place])} ${shape}`),
      make('td', {class: 'number'}, seen.nan[item].toLocaleString('en')), make('td', {class: 'number'}, seen.inf[item].toLocaleString('en')),
      make('td', {class: 'mark'}, elementText(seen.first[item], shape)),
      make('td', {class: 'number'}, seen.absmax[item] === -1 ? 'none' : numberText(seen.absmax[item])),
      make('td', {class: 'mark'}, crossing));
  },
};

// ---- births ----

function drawBirths() {
  const {shown, count: all} = data.births;
  if (shown.length === 0) return;
  show('births');
  const body = byId('births-body');
  body.append(make('p', {}, 'Where an operator or a module gave something bad, or met something that was bad already, in execution order on each rank.'));
  const list = lines => lines.length > 0 ? make('ul', {}, ...lines.map(line => make('li', {}, line))) : '';
  const MOST_SHOWN = 6;
  const rest = make('details', {class: 'further'}, make('summary', {}, `${(all - MOST_SHOWN).toLocaleString('en')} more`));
  shown.forEach((birth, number) => {
    const operator = text(places.operator[birth.place]);
    const facts = make('dl', {},
      ...term('tensor', `${text(places.role[birth.place])}, ${text(places.dtype[birth.place])} ${text(places.shape[birth.place])}: ${birth.nan} NaN, ${birth.inf} Inf`),
      ...term('backward node', birth.node), ...term('derivative of', birth.forward),
      ...term('values there', birth.values.map(([name, value]) => `${name} = ${numberText(value)}`).join(', ')),
      ...term('inputs', list(birth.inputs)), ...term('it reached', birth.reached.join(', ')),
      ...term('replayed', list(birth.replay)), ...term('called from', list(birth.stack)));
    (number < MOST_SHOWN ? body : rest).append(make('details', {class: 'birth', open: number === 0},
      make('summary', {}, make('span', {class: 'mono'}, operator || birth.kind),
        ` on rank ${birth.rank}, ${placeText(birth.place)} `, make('span', {class: 'chip'}, birth.kind)), facts));
  });
  if (all > shown.length) rest.append(make('p', {}, `${all - shown.length} in the ledgers only.`));
  if (all > MOST_SHOWN) body.append(rest);
}

// ---- histories ----

function drawHistories() {
  if (data.curves.length === 0) return;
  show('histories');
  const figures = make('div', {class: 'small-multiples'});
  data.curves.forEach(curve => figures.append(drawCurve(curve)));
  byId('histories-body').append(
    make('p', {}, 'The origin\u2019s parameter, then those whose largest magnitude grew most against their median. Logarithmic; focus a plot and use the arrow keys.'),
    make('ul', {class: 'legend'},
      make('li', {}, draw('svg', {width: 30, height: 12, 'aria-hidden': 'true'}, draw('path', {class: 'norm', d: 'M1,6 H29'})), 'norm'),
      make('li', {}, draw('svg', {width: 30, height: 12, 'aria-hidden': 'true'}, draw('path', {class: 'absmax', d: 'M1,6 H29'})), 'largest magnitude'),
      make('li', {}, draw('svg', {width: 14, height: 14, 'aria-hidden': 'true'}, draw('path', {class: 'cross', d: 'M2,2 L12,12 M12,2 L2,12'})), 'step with NaN or Inf')),
    figures);
}

function drawCurve(curve) {
  const width = 360, height = 170, left = 52, right = 10, top = 18, bottom = 22;
  const steps = curve.steps.length;
  const positive = [...curve.norm, ...curve.absmax].filter(value => value > 0).map(Math.log10);
  let low = Math.floor(Math.min(...positive, 0)), high = Math.ceil(Math.max(...positive, low + 1));
  if (positive.length > 0) {
    low = Math.floor(Math.min(...positive));
    high = Math.max(low + 1, Math.ceil(Math.max(...positive)));
  }
  const x = i => left + (steps > 1 ? i / (steps - 1) : 0.5) * (width - left - right);
  const y = value => top + (high - (value > 0 ? Math.log10(value) : low)) / (high - low) * (height - top - bottom);
  const svg = draw('svg', {viewBox: `0 0 ${width} ${height}`, width: '100%', tabindex: 0, role: 'img',
    'aria-label': `Norm and largest magnitude over steps ${curve.steps[0]} to ${curve.steps[steps - 1]}; arrow keys read values`});
  const every = Math.ceil((high - low) / 4);
  for (let power = low; power <= high; power += every) {
    svg.append(draw('line', {class: 'rule', x1: left, x2: width - right, y1: y(10 ** power), y2: y(10 ** power)}),
      draw('text', {x: left - 6, y: y(10 ** power) + 4, 'text-anchor': 'end'}, `1e${power}`));
  }
  svg.append(draw('text', {x: left, y: height - 5}, `step ${curve.steps[0]}`),
    draw('text', {x: width - right, y: height - 5, 'text-anchor': 'end'}, String(curve.steps[steps - 1])));
  for (const [name, values] of [['absmax', curve.absmax], ['norm', curve.norm]]) {
    let path = '', isDown = false;
    values.forEach((value, i) => {
      if (value === null) { isDown = false; return; }
      path += `${isDown ? 'L' : 'M'}${x(i).toFixed(1)},${y(value).toFixed(1)}`;
      isDown = true;
      const isAlone = (i === 0 || values[i - 1] === null) && (i === steps - 1 || values[i + 1] === null);
      if (isAlone) svg.append(draw('circle', {class: `${name}-dot`, cx: x(i), cy: y(value), r: 2.5}));
    });
    svg.append(draw('path', {class: name, d: path}));
  }
  curve.bad.forEach((bad, i) => {
    if (bad > 0) svg.append(draw('path', {class: 'cross', d: `M${x(i) - 4},${top - 12} l8,8 m0,-8 l-8,8`}));
  });
  const cursor = draw('line', {class: 'cursor', y1: top - 6, y2: height - bottom, visibility: 'hidden'});
  svg.append(cursor);
  const readout = make('div', {class: 'readout', 'aria-live': 'polite'});
  let at = steps - 1;
  function read(i) {
    at = Math.max(0, Math.min(steps - 1, i));
    cursor.setAttribute('x1', x(at));
    cursor.setAttribute('x2', x(at));
    cursor.setAttribute('visibility', 'visible');
    readout.textContent = `step ${curve.steps[at]}: norm ${numberText(curve.norm[at])}, largest ${numberText(curve.absmax[at])}` +
      (curve.bad[at] > 0 ? `, ${count(curve.bad[at], 'bad element')}` : '');
  }
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    read(Math.round(((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (steps - 1)));
  });
  svg.addEventListener('focus', () => read(at));
  svg.addEventListener('keydown', event => {
    const by = {ArrowLeft: -1, ArrowRight: 1, Home: -steps, End: steps}[event.key];
    if (!by) return;
    event.preventDefault();
    read(at + by);
  });
  readout.textContent = curve.growth > 0 ? `last finite maximum ${numberText(curve.growth)} times the median` : '';
  return make('figure', {}, make('figcaption', {},
    make('span', {class: 'mono'}, ...breakable(text(curve.parameter))), curve.is_origin ? make('span', {class: 'mark-bad'}, ' \u25c6 origin') : null,
    make('small', {}, ` rank ${curve.rank}, ${curve.phase}`)), svg, readout);
}

// ---- the heat map ----

function drawWindows() {
  if (data.windows.length === 0) return;
  show('tensor');
  const body = byId('tensor-body');
  const choices = data.windows.map(window => {
    const origin = data.origins.length > 1 ? `origin ${window.origin + 1}: ` : '';
    return `${origin}${window.name} (${window.dtype} [${window.shape.join(', ')}])`;
  });
  const holder = make('div', {});
  if (choices.length > 1) {
    const select = make('select', {onchange: () => holder.replaceChildren(heatMap(data.windows[select.selectedIndex]))},
      ...choices.map(choice => make('option', {}, choice)));
    body.append(make('div', {class: 'controls'}, make('label', {}, 'Tensor', select)));
  } else {
    body.append(make('p', {class: 'mono'}, choices[0]));
  }
  const firstBad = data.windows.findIndex(window => window.values.some(value => typeof value === 'string'));
  body.append(holder);
  const start = Math.max(0, firstBad);
  holder.append(heatMap(data.windows[start]));
  const select = body.querySelector('select');
  if (select) select.selectedIndex = start;
}

function heatMap(window) {
  const {rows, columns, values} = window;
  const cell = Math.max(9, Math.min(26, Math.floor(1000 / columns), Math.floor(560 / rows)));
  const left = 64, top = 26;
  const finite = values.filter(value => typeof value === 'number' && value !== 0).map(value => Math.log10(Math.abs(value)));
  const low = finite.reduce((a, b) => Math.min(a, b), Infinity), high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
  const strength = value => value === 0 ? 0 : 0.12 + 0.88 * (high > low ? (Math.log10(Math.abs(value)) - low) / (high - low) : 0.5);
  const rank = window.shape.length;
  const indexOf = (row, column) => rank === 0 ? []
    : rank === 1 ? [window.column + column] : [...window.fixed, window.row + row, window.column + column];
  const isFirst = (row, column) => window.first_bad.length > 0 && indexOf(row, column).join() === window.first_bad.join();
  const svg = draw('svg', {width: left + columns * cell + 4, height: top + rows * cell + 4, tabindex: 0, role: 'application',
    'aria-roledescription': 'heat map', 'aria-label': `${window.name}, ${rows} rows, ${columns} columns; arrow keys read values`});
  const ticks = size => { const step = Math.max(1, Math.ceil(size / 8)); return Array.from({length: Math.ceil(size / step)}, (_, i) => i * step); };
  for (const column of ticks(columns))
    svg.append(draw('text', {x: left + column * cell + cell / 2, y: top - 8, 'text-anchor': 'middle'}, String(window.column + column)));
  for (const row of ticks(rows))
    svg.append(draw('text', {x: left - 8, y: top + row * cell + cell / 2 + 4, 'text-anchor': 'end'}, String(window.row + row)));
  let first = [0, 0];
  for (let row = 0; row < rows; ++row) {
    for (let column = 0; column < columns; ++column) {
      const value = values[row * columns + column];
      const box = {x: left + column * cell, y: top + row * cell, width: cell - 1, height: cell - 1};
      if (typeof value === 'string') {
        const kind = value === 'nan' ? 'nan' : 'inf';
        svg.append(draw('rect', {...box, class: kind}), draw('text', {class: `on-${kind}`, x: box.x + cell / 2 - 0.5,
          y: box.y + cell / 2 + cell * 0.2, 'text-anchor': 'middle', 'font-size': Math.round(cell * 0.6)},
        value === 'nan' ? 'N' : value === 'inf' ? '+' : '\u2212'));
      } else {
        svg.append(draw('rect', {...box, fill: value < 0 ? '#2f7fd1' : '#d9822b', 'fill-opacity': strength(value).toFixed(3)}));
      }
      if (isFirst(row, column)) {
        first = [row, column];
        svg.append(draw('rect', {...box, class: 'first-bad'}));
      }
    }
  }
  const here = draw('rect', {class: 'here', width: cell - 1, height: cell - 1, visibility: 'hidden'});
  svg.append(here);
  const readout = make('p', {class: 'readout', 'aria-live': 'polite'});
  let [atRow, atColumn] = first;
  function read(row, column, isShown) {
    atRow = Math.max(0, Math.min(rows - 1, row));
    atColumn = Math.max(0, Math.min(columns - 1, column));
    here.setAttribute('x', left + atColumn * cell);
    here.setAttribute('y', top + atRow * cell);
    if (isShown) here.setAttribute('visibility', 'visible');
    readout.textContent = `[${indexOf(atRow, atColumn).join(', ')}] = ${numberText(values[atRow * columns + atColumn])}`;
  }
  read(...first, false);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    read(Math.floor((event.clientY - box.top - top) / cell), Math.floor((event.clientX - box.left - left) / cell), true);
  });
  svg.addEventListener('focus', () => read(atRow, atColumn, true));
  svg.addEventListener('keydown', event => {
    const by = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
    if (!by) return;
    event.preventDefault();
    read(atRow + by[0], atColumn + by[1], true);
  });
  const ramp = colour => {
    const node = make('span', {class: 'ramp'});
    node.style.background = `linear-gradient(to right, ${colour}1f, ${colour})`;
    return node;
  };
  const swatch = (kind, sign, words) => make('li', {}, make('span', {class: `swatch ${kind}`, 'aria-hidden': 'true'}, sign), words);
  const scale = finite.length > 0 ? `${numberText(10 ** low)} to ${numberText(10 ** high)}` : '';
  const bad = values.filter(value => typeof value === 'string').length;
  return make('div', {}, make('div', {class: 'heat-drawing'}, svg), readout,
    make('ul', {class: 'legend'}, swatch('nan', 'N', 'NaN'), swatch('inf', '\u00b1', 'Inf'), swatch('first', '', 'first bad element'),
      finite.length > 0 ? make('li', {}, ramp('#d9822b'), 'positive') : null,
      finite.length > 0 ? make('li', {}, ramp('#2f7fd1'), `negative; magnitude ${scale}, logarithmic`) : null,
      make('li', {}, `${count(bad, 'bad element')} of ${values.length.toLocaleString('en')} shown`)));
}

// ---- copying ----

async function copy(button) {
  const source = byId(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
  } catch {  // permission denied, or a browser without a clipboard for local files
    const range = document.createRange();
    range.selectNodeContents(source);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    document.execCommand('copy');
  }
  const before = button.textContent;
  button.textContent = 'Copied';
  announce('Copied');
  setTimeout(() => { button.textContent = before; }, 1500);
}
for (const button of document.querySelectorAll('[data-copy]')) {
  button.hidden = false;
  button.addEventListener('click', () => copy(button));
}

// ---- start ----

function applyAddress() {
  if (!address.read()) return;
  if (address.get('rank') !== '') {
    const index = ranks.indexOf.get(Number(address.get('rank')));
    if (index !== undefined) {
      selectRank(index, {move: true});
      byId('ranks').scrollIntoView();
    }
  }
  if (parameters.box) {
    parameters.box.value = address.get('parameter');
    parameters.filter();
    if (address.get('parameter')) byId('parameters').scrollIntoView();
  }
  if (ledgers.box) {
    ledgers.box.value = address.get('search');
    ledgers.filter();
    if (address.get('search')) byId('ledgers').scrollIntoView();
  }
}

grid.draw();
timeline.draw();
drawWindows();
drawBirths();
parameters.draw();
drawHistories();
ledgers.draw();
const origin = data.origins.find(entry => entry.ranks.length > 0);
const start = origin ? ranks.indexOf.get(origin.ranks[0]) : undefined;
if (start !== undefined) {
  selectedRank = start;
  showRank(start);
  for (const act of whenRankIsSelected) act(start, false);
} else {
  showRank(-1);
}
applyAddress();
addEventListener('hashchange', applyAddress);
addEventListener('beforeprint', () => {  // paper cannot be expanded
  for (const closed of document.querySelectorAll('details.origin')) closed.open = true;
});
document.documentElement.dataset.drawn = 'yes';
})();
