//! The table as rows that can be kept outside of the process, and the table made anew from them.
//!
//! Every change of a table that records them ([`Table::record_changes`]) leaves rows; applied in
//! order to an [`Image`], they make it equal to [`Table::image`]. What follows from the rows is not
//! in them: accounts, free superpages, and connections, of which a table made anew has none.

use super::client::Client;
use super::grant::{EndedGrants, Grants};
use super::segment::Segment;
use super::{ClientNumber, GrantId, Limits, Table, count_u32};
use farpool_wire::{ClientId, SegmentId, SegmentToken};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use thiserror::Error;

/// A client, as kept.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClientRow {
    /// Its number on this blade.
    pub number: u64,
    /// The id that it shows.
    pub id: u128,
    /// Its name.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// The user of this host that it belongs to.
    pub user: Option<u32>,
    /// Whose certificate began it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The most it may use.
    pub quota_superpages: u32,
    /// The grant it is under.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<u128>,
}

/// A grant, as kept.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantRow {
    /// Its id.
    pub id: u128,
    /// How often it was granted.
    pub epoch: u64,
    /// What its clients show.
    pub key: u128,
    /// What they showed before.
    pub key_before: Option<u128>,
    /// The most they may use together.
    pub quota_superpages: u32,
    /// How fast they may read together.
    pub read_bytes_per_s: u64,
    /// How fast they may write together.
    pub write_bytes_per_s: u64,
}

impl std::fmt::Debug for GrantRow {
    /// Without the keys: they are secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let GrantRow { id, epoch, quota_superpages, .. } = self;
        let mut row = f.debug_struct("GrantRow");
        row.field("id", id).field("epoch", epoch).field("quota_superpages", quota_superpages);
        row.finish_non_exhaustive()
    }
}

/// A segment without its superpages, as kept.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SegmentRow {
    /// Its id.
    pub id: u64,
    /// What opens it to others once it is frozen.
    pub token: u128,
    /// Its length.
    pub span_superpages: u32,
    /// Superpages that its memory can hold.
    pub limit_rmma: u32,
    /// Whether it is immutable.
    pub is_frozen: bool,
    /// Numbers of its clients, ascending, and how often each attached.
    pub users: Vec<(u64, u32)>,
    /// The client that it is charged to.
    pub charged: u64,
}

/// One change, or one part of an image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Row {
    /// The next numbers to give out, as they are never given out twice.
    Next {
        /// Of clients.
        client: u64,
        /// Of segments.
        segment: u64,
    },
    /// A client is new, or has changed.
    Client(ClientRow),
    /// A client is gone.
    ClientEnded {
        /// Its number.
        number: u64,
    },
    /// A grant is new, or has changed.
    Grant(GrantRow),
    /// A grant has ended, or an order for it that came late would have ended it.
    GrantEnded {
        /// Its id.
        id: u128,
        /// Orders up to this epoch are out of date.
        epoch: u64,
    },
    /// A segment is new, or has changed.
    Segment(SegmentRow),
    /// A segment is gone, with all its superpages.
    SegmentEnded {
        /// Its id.
        id: u64,
    },
    /// Superpages have memory: pairs of SMA and RMMA.
    Allocated {
        /// Their segment.
        segment: u64,
        /// The pairs.
        pairs: Vec<(u32, u32)>,
    },
    /// Superpages have no memory any more.
    Freed {
        /// Their segment.
        segment: u64,
        /// The first of them (SMA).
        first: u32,
        /// How many.
        count: u32,
    },
    /// Where the memory's superpages lie in the blade's file: pairs of RMMA and place. The memory
    /// leaves this row, not the table.
    Placed {
        /// Their segment.
        segment: u64,
        /// The pairs.
        pairs: Vec<(u32, u32)>,
    },
}

/// Rows that no table leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ImageError {
    /// A row is about a segment that was never made.
    #[error("superpages of segment {segment}, which is not there")]
    NoSegment {
        /// The segment.
        segment: u64,
    },
    /// A superpage has memory twice, or where it cannot be.
    #[error("superpage {sma} of segment {segment} cannot be where it is said to be")]
    Superpage {
        /// The segment.
        segment: u64,
        /// The superpage.
        sma: u32,
    },
    /// A segment's users are not as they must be.
    #[error(
        "the users of segment {segment} are not clients of this blade, or not those it can have"
    )]
    Users {
        /// The segment.
        segment: u64,
    },
    /// Two clients or two segments have the same name.
    #[error("client or segment {number} has the id or token of another one")]
    Twice {
        /// The later one's number.
        number: u64,
    },
    /// A client's grant is not there.
    #[error("client {number} is under a grant that is not there")]
    NoGrant {
        /// The client.
        number: u64,
    },
    /// Two grants have the same key, or one has none.
    #[error("grant {id} has no key of its own")]
    Key {
        /// The grant.
        id: u128,
    },
}

/// A segment and its superpages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentImage {
    /// The segment.
    pub row: SegmentRow,
    /// SMA superpage to RMMA superpage.
    pub map: BTreeMap<u32, u32>,
    /// RMMA superpage to place in the blade's file, if there is one.
    pub places: BTreeMap<u32, u32>,
}

/// All rows in force.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Image {
    next_client: u64,
    next_segment: u64,
    clients: BTreeMap<u64, ClientRow>,
    grants: BTreeMap<u128, GrantRow>,
    ended: EndedGrants,
    segments: BTreeMap<u64, SegmentImage>,
    /// Which superpage has a place in the file: the one that was last said to.
    holders: HashMap<u32, (u64, u32)>,
}

impl Image {
    /// Carries out one change.
    ///
    /// # Errors
    /// It is about a segment that is not there.
    pub fn apply(&mut self, row: Row) -> Result<(), ImageError> {
        match row {
            Row::Next { client, segment } => {
                self.next_client = self.next_client.max(client);
                self.next_segment = self.next_segment.max(segment);
            }
            Row::Client(row) => {
                self.next_client = self.next_client.max(row.number + 1);
                self.clients.insert(row.number, row);
            }
            Row::ClientEnded { number } => drop(self.clients.remove(&number)),
            Row::Grant(row) => drop(self.grants.insert(row.id, row)),
            Row::GrantEnded { id, epoch } => {
                self.grants.remove(&id);
                self.ended.insert(GrantId(id), epoch);
            }
            Row::Segment(row) => self.apply_segment(row),
            Row::SegmentEnded { id } => drop(self.segments.remove(&id)),
            Row::Allocated { segment, pairs } => self.segment(segment)?.map.extend(pairs),
            Row::Freed { segment, first, count } => {
                let map = &mut self.segment(segment)?.map;
                let first_kept = first.saturating_add(count);
                let mut later = map.split_off(&first);
                map.append(&mut later.split_off(&first_kept));
            }
            Row::Placed { segment, pairs } => self.apply_places(segment, pairs),
        }
        Ok(())
    }

    fn apply_segment(&mut self, row: SegmentRow) {
        self.next_segment = self.next_segment.max(row.id + 1);
        match self.segments.get_mut(&row.id) {
            Some(segment) => segment.row = row,
            None => {
                let (map, places) = (BTreeMap::new(), BTreeMap::new());
                self.segments.insert(row.id, SegmentImage { row, map, places });
            }
        }
    }

    /// A segment may have ended while its memory was placed.
    fn apply_places(&mut self, id: u64, pairs: Vec<(u32, u32)>) {
        for (rmma, place) in pairs {
            if let Some((before, rmma_before)) = self.holders.insert(place, (id, rmma))
                && let Some(segment) = self.segments.get_mut(&before)
                && segment.places.get(&rmma_before) == Some(&place)
            {
                segment.places.remove(&rmma_before);
            }
            if let Some(segment) = self.segments.get_mut(&id) {
                segment.places.insert(rmma, place);
            }
        }
    }

    fn segment(&mut self, segment: u64) -> Result<&mut SegmentImage, ImageError> {
        self.segments.get_mut(&segment).ok_or(ImageError::NoSegment { segment })
    }

    /// Forgets the superpages that have no place in the file: they were being allocated, and their
    /// client has no answer.
    pub fn drop_unplaced(&mut self) {
        for SegmentImage { map, places, .. } in self.segments.values_mut() {
            map.retain(|_, rmma| places.contains_key(rmma));
            let used: BTreeSet<u32> = map.values().copied().collect();
            places.retain(|rmma, _| used.contains(rmma));
        }
    }

    /// Sets where a segment's superpages lie.
    pub fn set_places(&mut self, segment: SegmentId, pairs: Vec<(u32, u32)>) {
        self.apply_places(segment.0, pairs);
    }

    /// The rows that make this image.
    pub fn rows(&self) -> impl Iterator<Item = Row> + '_ {
        let next = Row::Next { client: self.next_client, segment: self.next_segment };
        let ended = self.ended.iter().map(|(id, epoch)| Row::GrantEnded { id: id.0, epoch });
        let grants = self.grants.values().map(|row| Row::Grant(row.clone()));
        let clients = self.clients.values().map(|row| Row::Client(row.clone()));
        let segments = self.segments.values().flat_map(|segment| {
            let SegmentImage { row, map, places } = segment;
            let pairs = |of: &BTreeMap<u32, u32>| of.iter().map(|(a, b)| (*a, *b)).collect();
            [
                Row::Segment(row.clone()),
                Row::Allocated { segment: row.id, pairs: pairs(map) },
                Row::Placed { segment: row.id, pairs: pairs(places) },
            ]
        });
        std::iter::once(next).chain(ended).chain(grants).chain(clients).chain(segments)
    }

    /// All segments.
    pub fn segments(&self) -> impl Iterator<Item = &SegmentImage> {
        self.segments.values()
    }

    /// How many clients and segments there are.
    pub fn counts(&self) -> (usize, usize) {
        (self.clients.len(), self.segments.len())
    }

    /// Superpages with memory.
    pub fn superpages(&self) -> u64 {
        self.segments.values().map(|segment| segment.map.len() as u64).sum()
    }
}

impl<M: Clone> Table<M> {
    /// Begins to record the changes.
    pub fn record_changes(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// Takes the changes since the last call; they are one step, which is whole or not at all.
    pub fn take_changes(&mut self) -> Vec<Row> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(super) fn note(&mut self, row: impl FnOnce() -> Row) {
        if let Some(changes) = &mut self.changes {
            changes.push(row());
        }
    }

    pub(super) fn note_client(&mut self, number: ClientNumber) {
        if let (Some(changes), Some(client)) = (&mut self.changes, self.clients.get(&number)) {
            changes.push(Row::Client(client.row(number)));
        }
    }

    /// Notes a segment as it is now, which may be gone.
    pub(super) fn note_segment(&mut self, id: SegmentId) {
        if let Some(changes) = &mut self.changes {
            changes.push(match self.segments.get(&id) {
                Some(segment) => Row::Segment(segment.row(id)),
                None => Row::SegmentEnded { id: id.0 },
            });
        }
    }

    /// Notes a grant as it is now, if it is there.
    pub(super) fn note_grant(&mut self, id: GrantId) {
        if let (Some(changes), Some(row)) = (&mut self.changes, self.grants.row(id)) {
            changes.push(Row::Grant(row));
        }
    }

    /// All clients, grants and segments as of now, without places.
    pub fn image(&self) -> Image {
        let segment = |(id, segment): (&SegmentId, &Segment<M>)| {
            let (row, map) = (segment.row(*id), segment.map.clone());
            (id.0, SegmentImage { row, map, places: BTreeMap::new() })
        };
        Image {
            next_client: self.next_client,
            next_segment: self.next_segment,
            clients: self.clients.iter().map(|(n, client)| (n.0, client.row(*n))).collect(),
            grants: self.grants.rows().map(|row| (row.id, row)).collect(),
            ended: self.grants.ended().clone(),
            segments: self.segments.iter().map(segment).collect(),
            holders: HashMap::new(),
        }
    }

    /// The memory of each segment.
    pub fn memories(&self) -> impl Iterator<Item = (SegmentId, &M)> {
        self.segments.iter().map(|(id, segment)| (*id, &segment.memory))
    }

    /// A table with what the image has, whose clients have a whole lease to come back. `make`
    /// returns a segment's memory. More may be lent than the limits allow; then nothing more is.
    ///
    /// # Errors
    /// No table can have left this image, or its memory cannot be made.
    pub fn restore<E: From<ImageError>>(
        limits: Limits,
        image: &Image,
        mut make: impl FnMut(&SegmentImage) -> Result<M, E>,
    ) -> Result<Table<M>, E> {
        let mut table = Table::new(limits);
        table.next_client = image.next_client.max(1);
        table.next_segment = image.next_segment.max(1);
        table.grants = Grants::restore(image.grants.values(), image.ended.clone())?;
        for row in image.clients.values() {
            let number = ClientNumber(row.number);
            if let Some(id) = row.grant.map(GrantId) {
                if table.grants.row(id).is_none() {
                    return Err(ImageError::NoGrant { number: row.number }.into());
                }
                table.grants.add_client(id, number);
            }
            table.clients.insert(number, Client::restore(row, limits.lease));
            if table.numbers.insert(ClientId(row.id), number).is_some() {
                return Err(ImageError::Twice { number: row.number }.into());
            }
        }
        for segment in image.segments.values() {
            table.check_segment(segment)?;
            let memory = make(segment)?;
            table.insert_segment(segment, memory);
        }
        Ok(table)
    }

    fn check_segment(&self, image: &SegmentImage) -> Result<(), ImageError> {
        let SegmentImage { row, map, .. } = image;
        let is_client = |number: u64| self.clients.contains_key(&ClientNumber(number));
        let are_clients = row.users.iter().all(|(user, uses)| is_client(*user) && *uses > 0);
        let is_charged = row.users.iter().any(|(user, _)| *user == row.charged);
        let is_owned = row.is_frozen || matches!(row.users[..], [(_, 1)]);
        let grant_of = |number: u64| self.clients.get(&ClientNumber(number)).map(|it| it.grant);
        let is_shared_within = |(user, _): &(u64, u32)| grant_of(*user) == grant_of(row.charged);
        let is_of_one_grant = row.users.iter().all(is_shared_within);
        if !are_clients || !is_charged || !is_owned || !is_of_one_grant {
            return Err(ImageError::Users { segment: row.id });
        }
        if self.tokens.contains_key(&SegmentToken(row.token)) {
            return Err(ImageError::Twice { number: row.id });
        }
        let mut taken = BTreeSet::new();
        let mut fits = |sma: u32, rmma: u32| {
            sma < row.span_superpages && rmma < row.limit_rmma && taken.insert(rmma)
        };
        match map.iter().find(|(sma, rmma)| !fits(**sma, **rmma)) {
            Some((sma, _)) => Err(ImageError::Superpage { segment: row.id, sma: *sma }),
            None => Ok(()),
        }
    }

    fn insert_segment(&mut self, image: &SegmentImage, memory: M) {
        let row = &image.row;
        let (id, superpages) = (SegmentId(row.id), count_u32(image.map.len()));
        let mut grant = None;
        for (user, _) in &row.users {
            let client = self.clients.get_mut(&ClientNumber(*user)).expect("checked before");
            client.segments.insert(id);
            if *user == row.charged {
                client.used_superpages += superpages;
                grant = client.grant;
            }
        }
        if let Some(grant) = grant {
            self.grants.charge(grant, superpages.into());
        }
        self.used_superpages += superpages;
        self.tokens.insert(SegmentToken(row.token), id);
        self.segments.insert(id, Segment::restore(row, grant, image.map.clone(), memory));
    }
}
