use super::*;

/// Events that only store a condition.
const NOTED: [Event; 8] = [
    Event::DriverOk,
    Event::Reset,
    Event::BusMasterOn,
    Event::BusMasterOff,
    Event::QueueEnable,
    Event::QueueReset,
    Event::VmRun,
    Event::VmStop,
];

fn all_conditions() -> impl Iterator<Item = Conditions> {
    (0..1u32 << 6).map(|bits| {
        let bit = |place: u32| bits & (1 << place) != 0;
        Conditions {
            driver_ok: bit(0),
            bus_master: bit(1),
            enabled: bit(2),
            running: bit(3),
            by_eventfd: bit(4),
            stop_due: bit(5),
        }
    })
}

/// Each row of the table: state and conditions before, event, outcome.
fn each_row(mut claim: impl FnMut(State, Conditions, Event, Outcome)) {
    let mut rows = 0;
    for state in State::ALL {
        for conditions in all_conditions() {
            for event in Event::ALL {
                claim(state, conditions, event, next(state, conditions, event));
                rows += 1;
            }
        }
    }
    assert_eq!(rows, 3 * 64 * 12);
}

/// The state afterwards.
fn then(state: State, outcome: Outcome) -> State {
    match outcome {
        Outcome::To(to) => to,
        Outcome::StopBackend | Outcome::Refused(_) => state,
    }
}

#[test]
fn only_its_backend_ends_off_limits() {
    each_row(|state, conditions, event, outcome| {
        if state == State::OffLimits && event != Event::BackendStop {
            assert_eq!(then(state, outcome), State::OffLimits, "{conditions:?} {event:?}");
        }
    });
}

#[test]
fn only_the_start_of_a_backend_makes_a_queue_off_limits() {
    each_row(|state, conditions, event, outcome| {
        if state != State::OffLimits && then(state, outcome) == State::OffLimits {
            assert_eq!(event, Event::BackendStart);
            let Conditions {
                driver_ok,
                bus_master,
                enabled,
                running,
                ..
            } = conditions;
            assert!(driver_ok && bus_master && enabled && running);
        }
    });
}

#[test]
fn an_assigned_queue_has_all_conditions() {
    each_row(|state, conditions, event, outcome| {
        if outcome == Outcome::To(State::Assigned) {
            let after = conditions.after(state, event);
            assert!(
                after.driver_ok && after.bus_master && after.enabled,
                "{conditions:?} {event:?}"
            );
            assert!(after.running && after.by_eventfd, "{conditions:?} {event:?}");
        }
    });
}

#[test]
fn a_queue_of_ours_with_all_conditions_is_assigned() {
    each_row(|state, conditions, event, outcome| {
        let after = conditions.after(state, event);
        let all = after.driver_ok && after.bus_master && after.enabled && after.running && after.by_eventfd;
        let ours = state != State::OffLimits && NOTED.contains(&event);
        let given_back = state == State::OffLimits && event == Event::BackendStop;
        if all && (ours || given_back) {
            assert_eq!(
                outcome,
                Outcome::To(State::Assigned),
                "{state:?} {conditions:?} {event:?}"
            );
        }
    });
}

#[test]
fn the_guest_and_the_run_state_are_never_refused() {
    each_row(|state, conditions, event, outcome| {
        let refused = matches!(outcome, Outcome::Refused(_));
        assert!(
            !refused || !NOTED.contains(&event),
            "{state:?} {conditions:?} {event:?}"
        );
    });
}

#[test]
fn each_event_notes_its_condition_in_every_state() {
    each_row(|state, conditions, event, _| {
        let mut expected = conditions;
        match event {
            Event::DriverOk => expected.driver_ok = true,
            Event::Reset => {
                expected.driver_ok = false;
                expected.enabled = false;
            }
            Event::BusMasterOn | Event::BusMasterOff => expected.bus_master = event == Event::BusMasterOn,
            Event::QueueEnable | Event::QueueReset => expected.enabled = event == Event::QueueEnable,
            Event::VmRun | Event::VmStop => expected.running = event == Event::VmRun,
            _ => {}
        }
        let after = conditions.after(state, event);
        expected.stop_due = after.stop_due;
        assert_eq!(after, expected, "{state:?} {event:?}");
    });
}

#[test]
fn a_backend_is_stopped_once_its_queue_was_not_ready() {
    each_row(|state, conditions, event, outcome| {
        let after = conditions.after(state, event);
        let due = conditions.stop_due || !after.ready();
        if state == State::OffLimits && NOTED.contains(&event) {
            assert_eq!(outcome == Outcome::StopBackend, due, "{conditions:?} {event:?}");
            assert_eq!(after.stop_due, due, "{conditions:?} {event:?}");
        } else {
            assert_ne!(
                outcome,
                Outcome::StopBackend,
                "{state:?} {conditions:?} {event:?}"
            );
        }
        if state != State::OffLimits || event == Event::BackendStop {
            assert!(!after.stop_due);
        }
    });
}

#[test]
fn images_are_made_of_queues_that_stand_and_that_no_backend_has() {
    each_row(|state, conditions, event, outcome| {
        if matches!(event, Event::Save | Event::Restore) {
            let stands = !conditions.running && state != State::OffLimits;
            assert_eq!(
                matches!(outcome, Outcome::Refused(_)),
                !stands,
                "{state:?} {conditions:?}"
            );
            // A queue that is assigned without its conditions is no row that is reached.
            if stands && state == State::Deassigned {
                assert_eq!(outcome, Outcome::To(State::Deassigned));
            }
        }
    });
}

#[test]
fn backends_start_once_when_ready_and_stop_once() {
    each_row(|state, conditions, event, outcome| match (event, state) {
        (Event::BackendStart, State::OffLimits) => {
            assert_eq!(outcome, Outcome::Refused(Refusal::BackendOwns));
        }
        (Event::BackendStart, _) if conditions.ready() => {
            assert_eq!(outcome, Outcome::To(State::OffLimits));
        }
        (Event::BackendStart, _) => {
            assert!(matches!(outcome, Outcome::Refused(Refusal::NotReady { .. })));
        }
        (Event::BackendStop, State::OffLimits) => assert!(matches!(outcome, Outcome::To(_))),
        (Event::BackendStop, _) => assert_eq!(outcome, Outcome::Refused(Refusal::NoBackend)),
        _ => {}
    });
}

#[test]
fn closed_rings_are_never_looked_at() {
    for before in all_conditions() {
        for after in all_conditions() {
            if looks(before, after) {
                assert!(after.driver_ok && after.bus_master && after.enabled);
                assert!(before.running || after.running);
            }
        }
    }
}

#[test]
fn a_queue_that_gets_ready_by_exits_is_looked_at() {
    each_row(|state, conditions, event, outcome| {
        let after = conditions.after(state, event);
        if outcome == Outcome::To(State::Deassigned) && after.ready() {
            assert!(looks(conditions, after), "{state:?} {conditions:?} {event:?}");
        }
    });
}

/// What a reader of the documentation expects, told as a story.
#[test]
fn a_guest_that_resets_and_comes_back_does_not_meet_its_old_backend() {
    let mut conditions = Conditions {
        bus_master: true,
        by_eventfd: true,
        ..Conditions::default()
    };
    let mut state = State::Deassigned;
    let story = [
        (Event::VmRun, Outcome::To(State::Deassigned)),
        (Event::QueueEnable, Outcome::To(State::Deassigned)),
        (Event::DriverOk, Outcome::To(State::Assigned)),
        (Event::BackendStart, Outcome::To(State::OffLimits)),
        (Event::BusMasterOn, Outcome::To(State::OffLimits)),
        (Event::Reset, Outcome::StopBackend),
        (Event::QueueEnable, Outcome::StopBackend),
        (Event::DriverOk, Outcome::StopBackend),
        (Event::BackendStop, Outcome::To(State::Assigned)),
        (Event::VmStop, Outcome::To(State::Deassigned)),
        (Event::Save, Outcome::To(State::Deassigned)),
    ];
    for (event, expected) in story {
        let outcome = next(state, conditions, event);
        assert_eq!(outcome, expected, "{event:?}");
        conditions = conditions.after(state, event);
        state = then(state, outcome);
    }
}
