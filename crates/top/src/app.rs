//! Which table is shown, in which order, and how it is drawn.

use client::text::views::{self, Cell, Readings, View};
use model::state::Status;
use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Row, Table};

use crate::Reading;

/// A kind of rows.
struct Tab {
    title: &'static str,
    view: fn(&[Readings<'_>]) -> View,
    /// Column by which rows are sorted.
    column: usize,
    is_descending: bool,
}

/// See the module's head.
pub(crate) struct App {
    tabs: [Tab; 3],
    shown: usize,
    /// First row that is shown.
    top: usize,
    is_paused: bool,
    now: Vec<Status>,
    before: Vec<Status>,
    /// Why the daemons do not answer any more.
    error: Option<String>,
}

impl App {
    pub(crate) fn new(now: Vec<Status>) -> Self {
        let tab = |title, view, column| Tab {
            title,
            view,
            column,
            is_descending: true,
        };
        Self {
            tabs: [
                tab("ports", views::ports, 4),
                tab("queues", views::queues, 4),
                tab("workers", views::workers, 2),
            ],
            shown: 0,
            top: 0,
            is_paused: false,
            now,
            before: Vec::new(),
            error: None,
        }
    }

    /// Takes a new reading.
    pub(crate) fn update(&mut self, reading: Reading) {
        if self.is_paused {
            return;
        }
        match reading {
            Ok(now) => {
                self.before = std::mem::replace(&mut self.now, now);
                self.error = None;
            }
            Err(error) => self.error = Some(error),
        }
    }

    /// Handles a key; false: quit.
    pub(crate) fn press(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return true;
        }
        let columns = self.view().header.len();
        let tab = &mut self.tabs[self.shown];
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Char(digit @ '1'..='3') => self.show(digit as usize - '1' as usize),
            KeyCode::Tab => self.show((self.shown + 1) % self.tabs.len()),
            KeyCode::BackTab => self.show((self.shown + self.tabs.len() - 1) % self.tabs.len()),
            KeyCode::Char('<') | KeyCode::Left => tab.column = (tab.column + columns - 1) % columns,
            KeyCode::Char('>') | KeyCode::Right => tab.column = (tab.column + 1) % columns,
            KeyCode::Char('r') => tab.is_descending = !tab.is_descending,
            KeyCode::Char(' ') => self.is_paused = !self.is_paused,
            KeyCode::Up => self.top = self.top.saturating_sub(1),
            KeyCode::Down => self.top += 1,
            KeyCode::PageUp => self.top = self.top.saturating_sub(20),
            KeyCode::PageDown => self.top += 20,
            KeyCode::Home => self.top = 0,
            _ => {}
        }
        true
    }

    fn show(&mut self, tab: usize) {
        (self.shown, self.top) = (tab, 0);
    }

    /// The shown table, sorted.
    fn view(&self) -> View {
        let daemons = self.now.iter().map(|now| Readings {
            now,
            before: self.before.iter().find(|before| before.pid == now.pid),
        });
        let tab = &self.tabs[self.shown];
        let mut view = (tab.view)(&daemons.collect::<Vec<_>>());
        view.rows.sort_by(|one, other| {
            let order = one[tab.column].order(&other[tab.column]);
            if tab.is_descending { order.reverse() } else { order }
        });
        view
    }

    /// Draws everything.
    pub(crate) fn draw(&mut self, frame: &mut Frame<'_>) {
        let [head, body, foot] =
            Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
                .areas(frame.area());
        let view = self.view();
        // The header takes a line.
        let room = usize::from(body.height.saturating_sub(1));
        self.top = self.top.min(view.rows.len().saturating_sub(room));
        frame.render_widget(self.head(), head);
        frame.render_widget(self.table(&view, room), body);
        frame.render_widget(
            Line::styled(
                "1-3/Tab view  </> sort  r reverse  arrows scroll  Space pause  q quit",
                Style::new().add_modifier(Modifier::DIM),
            ),
            foot,
        );
    }

    fn head(&self) -> Line<'_> {
        let ports: usize = self.now.iter().map(|daemon| daemon.ports.len()).sum();
        let mut spans = vec![Span::raw(format!(
            "{} daemon(s), {ports} port(s)  ",
            self.now.len()
        ))];
        for (at, tab) in self.tabs.iter().enumerate() {
            let style = match at == self.shown {
                true => Style::new().add_modifier(Modifier::REVERSED),
                false => Style::new(),
            };
            spans.push(Span::styled(format!(" {} {} ", at + 1, tab.title), style));
        }
        let state = match (&self.error, self.is_paused) {
            (_, true) => "  paused".to_owned(),
            (Some(error), false) => format!("  {error}"),
            (None, false) => String::new(),
        };
        spans.push(Span::styled(state, Style::new().add_modifier(Modifier::BOLD)));
        Line::from(spans)
    }

    fn table(&self, view: &View, room: usize) -> Table<'static> {
        let tab = &self.tabs[self.shown];
        let arrow = if tab.is_descending { '↓' } else { '↑' };
        let titles: Vec<String> = (view.header.iter().enumerate())
            .map(|(at, title)| match at == tab.column {
                true => format!("{title}{arrow}"),
                false => (*title).to_owned(),
            })
            .collect();
        let is_text = |at: usize| view.rows.iter().any(|row| matches!(row[at], Cell::Text(_)));
        let align = |at: usize| {
            if is_text(at) {
                Alignment::Left
            } else {
                Alignment::Right
            }
        };
        let cell = |(at, text): (usize, String)| Text::from(text).alignment(align(at));
        let texts = |row: &Vec<Cell>| row.iter().map(ToString::to_string).collect::<Vec<_>>();
        let widths = titles.iter().enumerate().map(|(at, title)| {
            let cells = view.rows.iter().map(|row| row[at].to_string().chars().count());
            let width = cells.chain([title.chars().count()]).max().unwrap_or(0);
            Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX))
        });
        let widths: Vec<Constraint> = widths.collect();
        let header = titles.iter().cloned().enumerate().map(cell);
        let header = Row::new(header.collect::<Vec<_>>()).style(Style::new().add_modifier(Modifier::BOLD));
        let shown = view.rows.iter().skip(self.top).take(room);
        let rows =
            shown.map(|row| Row::new(texts(row).into_iter().enumerate().map(cell).collect::<Vec<_>>()));
        Table::new(rows.collect::<Vec<_>>(), widths)
            .header(header)
            .column_spacing(2)
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::{Value, json};

    use super::*;

    fn port(name: &str, bytes: u64) -> Value {
        let counter = |name: &str, drop: bool, value: u64| json!({"name": name, "source": "lane", "drop": drop, "value": value});
        json!({
            "name": name, "nic": "network lan", "network": "lan", "endpoint": "/run/a.sock", "macs": [], "vlans": [],
            "mac": "02:00:00:00:00:01", "connected": true, "peer": 7, "memory": "copy", "mtu": 1500, "features": "0x0",
            "offload_offered": [], "offload": [], "sessions": 1, "limits": {"from_guest": {}, "to_guest": {}},
            "lanes": [{
                "pair": 0, "running": true, "mode": "network", "fallbacks": [], "multi_buffer": false,
                "packet_bytes": 0, "kernel_bytes": 0,
                "counters": [counter("from_guest_bytes", false, bytes), counter("to_guest_no_buffer", true, bytes / 1000)],
            }],
        })
    }

    /// A daemon after so many seconds: `vm2` sends twice as much as `vm1`.
    fn daemon(seconds: u64) -> Status {
        let mut reading = serde_json::to_value(model::state::WorkerReading::default()).expect("JSON");
        reading["total"]["age_ns"] = json!(seconds * 1_000_000_000);
        let bytes = seconds * 1_000_000;
        let sandbox =
            json!({"user": "", "mounts": "", "network": "", "capabilities": "", "files": "", "calls": ""});
        let status = json!({
            "pid": 1, "version": "0", "cpu_us": 0, "sandbox": sandbox, "configuration": null, "workers": [],
            "work": [reading], "networks": [], "ports": [port("vm1", bytes), port("vm2", 2 * bytes)],
        });
        serde_json::from_value(status).expect("a status")
    }

    fn press(app: &mut App, code: KeyCode) -> bool {
        app.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    fn lines(app: &mut App) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(160, 6)).expect("a terminal");
        terminal.draw(|frame| app.draw(frame)).expect("it draws");
        let buffer = terminal.backend().buffer().clone();
        let rows = buffer.content.chunks(160);
        rows.map(|row| row.iter().map(ratatui::buffer::Cell::symbol).collect())
            .collect()
    }

    #[test]
    fn ports_are_sorted_by_the_chosen_column() {
        let mut app = App::new(vec![daemon(1)]);
        app.update(Ok(vec![daemon(3)]));
        let order = |app: &mut App| {
            let lines = lines(app);
            [&lines[2], &lines[3]].map(|line| line.split_whitespace().next().expect("a name").to_owned())
        };
        assert_eq!(order(&mut app), ["vm2", "vm1"]);
        let shown = lines(&mut app);
        assert!(shown[2].contains("16M") && shown[2].contains("2k"), "{shown:#?}");
        assert!(press(&mut app, KeyCode::Char('r')));
        assert_eq!(order(&mut app), ["vm1", "vm2"]);
        for _ in 0..4 {
            assert!(press(&mut app, KeyCode::Char('<')));
        }
        assert!(press(&mut app, KeyCode::Char('r')));
        assert_eq!(order(&mut app), ["vm2", "vm1"], "by name, descending");
    }

    #[test]
    fn daemon_that_ends_and_a_pause_are_shown_and_keys_quit() {
        let mut app = App::new(vec![daemon(1)]);
        app.update(Err("no daemon answers".to_owned()));
        assert!(lines(&mut app)[0].contains("no daemon answers"));
        assert!(press(&mut app, KeyCode::Char(' ')));
        app.update(Ok(Vec::new()));
        assert!(lines(&mut app)[0].contains("paused") && lines(&mut app)[2].contains("vm"));
        assert!(press(&mut app, KeyCode::Char('3')));
        assert!(lines(&mut app)[1].contains("busy %"));
        assert!(!press(&mut app, KeyCode::Char('q')) && !press(&mut app, KeyCode::Esc));
        assert!(!app.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }
}
