//! Segments: how they are created, allocated, frozen, shared and dropped.

use super::{ClientNumber, GrantId, Refused, Row, Scrub, ScrubPart, SegmentRow, Table, count_u32};
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::{
    ErrorCode, SegmentId, SegmentState, SegmentToken, SuperpageNumber, SuperpagePair,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

#[derive(Debug)]
pub(super) struct Segment<M> {
    token: SegmentToken,
    /// The grant under which it was made; only clients under the same may use it.
    grant: Option<GrantId>,
    span_superpages: u32,
    pub(super) frozen: bool,
    /// How often each user attached (the owner's first use included).
    pub(super) users: BTreeMap<ClientNumber, u32>,
    charged: ClientNumber,
    /// SMA superpage to RMMA superpage.
    pub(super) map: BTreeMap<u32, u32>,
    /// RMMA superpages below `next_rmma` that are zero and free; low ones first, to stay dense.
    free: BTreeSet<u32>,
    next_rmma: u32,
    /// Superpages that the segment's memory can hold.
    limit_rmma: u32,
    /// Writes under way: their bytes may still be arriving.
    pub(super) writers: Arc<AtomicU32>,
    pub(super) memory: M,
}

/// A segment as shown by attach and list, without its list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentView {
    /// The segment.
    pub segment: SegmentId,
    /// Its length.
    pub span_superpages: u32,
    /// Superpages with memory.
    pub allocated_superpages: u32,
    /// Whether it can be written.
    pub state: SegmentState,
}

impl<M> Segment<M> {
    pub(super) fn row(&self, id: SegmentId) -> SegmentRow {
        SegmentRow {
            id: id.0,
            token: self.token.0,
            span_superpages: self.span_superpages,
            limit_rmma: self.limit_rmma,
            is_frozen: self.frozen,
            users: self.users.iter().map(|(user, uses)| (user.0, *uses)).collect(),
            charged: self.charged.0,
        }
    }

    /// A segment as it was; what its memory does not need is free.
    pub(super) fn restore(
        row: &SegmentRow,
        grant: Option<GrantId>,
        map: BTreeMap<u32, u32>,
        memory: M,
    ) -> Self {
        let next_rmma = map.values().max().map_or(0, |last| last + 1);
        let used: BTreeSet<u32> = map.values().copied().collect();
        let free = (0..next_rmma).filter(|rmma| !used.contains(rmma)).collect();
        Segment {
            token: SegmentToken(row.token),
            grant,
            span_superpages: row.span_superpages,
            frozen: row.is_frozen,
            users: row.users.iter().map(|(user, uses)| (ClientNumber(*user), *uses)).collect(),
            charged: ClientNumber(row.charged),
            map,
            free,
            next_rmma,
            limit_rmma: row.limit_rmma,
            writers: Arc::default(),
            memory,
        }
    }

    fn free_rmmas(&self) -> u32 {
        count_u32(self.free.len()) + (self.limit_rmma - self.next_rmma)
    }

    /// Takes the lowest free RMMA superpage; the caller has checked [`Self::free_rmmas`].
    fn take_rmma(&mut self) -> u32 {
        let rmma = self.free.pop_first().unwrap_or_else(|| {
            assert!(self.next_rmma < self.limit_rmma, "a segment's memory is used up");
            self.next_rmma += 1;
            self.next_rmma - 1
        });
        assert!(rmma < self.next_rmma, "superpage {rmma} was free and never given out");
        rmma
    }

    pub(super) fn give_back(&mut self, rmmas: &[u32]) {
        for rmma in rmmas {
            let is_new = self.free.insert(*rmma);
            assert!(is_new && *rmma < self.next_rmma, "superpage {rmma} was given back twice");
        }
    }

    fn uses(&self) -> u64 {
        self.users.values().map(|uses| u64::from(*uses)).sum()
    }

    /// Changing the table under a write whose bytes are still arriving could place them wrongly.
    fn no_writers(&self) -> Result<(), Refused> {
        match self.writers.load(Ordering::Acquire) {
            0 => Ok(()),
            writers => Err(Refused::new(ErrorCode::InUse, u64::from(writers))),
        }
    }

    fn check_range(&self, first: SuperpageNumber, count: u32) -> Result<(), Refused> {
        match first.0.checked_add(count) {
            Some(end) if end <= self.span_superpages => Ok(()),
            _ => Err(Refused::new(ErrorCode::OutOfRange, u64::from(self.span_superpages))),
        }
    }

    pub(super) fn check_writable(&self, id: SegmentId) -> Result<(), Refused> {
        if self.frozen { Err(Refused::new(ErrorCode::Frozen, id.0)) } else { Ok(()) }
    }
}

impl<M: Clone> Table<M> {
    /// Makes an empty segment. `make` gets the number of superpages its memory must be able to
    /// hold: the client's quota or the span, whichever is less.
    ///
    /// # Errors
    /// The blade has as many segments as allowed, or the token is taken.
    pub fn create_segment(
        &mut self,
        client: ClientNumber,
        span_superpages: u32,
        token: SegmentToken,
        make: impl FnOnce(u32) -> M,
    ) -> Result<SegmentId, Refused> {
        let maker = self.client(client)?;
        let (grant, limit_rmma) = (maker.grant, maker.quota_superpages.min(span_superpages));
        if self.segments.len() >= self.limits.segments {
            return Err(Refused::new(ErrorCode::TooMany, self.limits.segments as u64));
        }
        if self.tokens.contains_key(&token) {
            return Err(Refused::new(ErrorCode::InUse, 0));
        }
        let id = SegmentId(self.next_segment);
        self.next_segment += 1;
        let segment = Segment {
            token,
            grant,
            span_superpages,
            frozen: false,
            users: BTreeMap::from([(client, 1)]),
            charged: client,
            map: BTreeMap::new(),
            free: BTreeSet::new(),
            next_rmma: 0,
            limit_rmma,
            writers: Arc::default(),
            memory: make(limit_rmma),
        };
        let known = (self.segments.insert(id, segment), self.tokens.insert(token, id));
        assert!(matches!(known, (None, None)), "segment {} was there already", id.0);
        if let Some(client) = self.clients.get_mut(&client) {
            client.segments.insert(id);
        }
        self.note_segment(id);
        Ok(id)
    }

    /// Gives memory to superpages `first` to `first + count - 1`, which must have none. Appends
    /// their pairs to `pairs`, ascending, and returns the memory they are in.
    ///
    /// # Errors
    /// Frozen, out of range, allocated already, the blade is full, or over quota. While a scrub is
    /// pending, full may be temporary.
    pub fn allocate(
        &mut self,
        client: ClientNumber,
        id: SegmentId,
        first: SuperpageNumber,
        count: u32,
        pairs: &mut Vec<SuperpagePair>,
    ) -> Result<M, Refused> {
        self.check_allocate(client, id, first, count)?;
        let begin = pairs.len();
        let segment = self.segment_of_mut(client, id)?;
        for sma in first.0..first.0 + count {
            let rmma = segment.take_rmma();
            let before = segment.map.insert(sma, rmma);
            assert_eq!(before, None, "superpage {sma} got memory twice");
            pairs.push(SuperpagePair::new(SuperpageNumber(sma), SuperpageNumber(rmma)));
        }
        let memory = segment.memory.clone();
        self.used_superpages += count;
        assert!(self.used_superpages <= self.capacity_superpages, "more is lent than there is");
        self.charge(client, i64::from(count));
        self.note(|| {
            let pairs = pairs[begin..].iter().map(|pair| (pair.sma().0, pair.rmma().0)).collect();
            Row::Allocated { segment: id.0, pairs }
        });
        Ok(memory)
    }

    fn check_allocate(
        &self,
        client: ClientNumber,
        id: SegmentId,
        first: SuperpageNumber,
        count: u32,
    ) -> Result<(), Refused> {
        let segment = self.segment_of(client, id)?;
        segment.check_writable(id)?;
        segment.check_range(first, count)?;
        if let Some((sma, _)) = segment.map.range(first.0..first.0 + count).next() {
            return Err(Refused::new(ErrorCode::AlreadyAllocated, u64::from(*sma)));
        }
        let capacity_bytes = u64::from(self.capacity_superpages) * SUPERPAGE_BYTES;
        let full = Err(Refused::new(ErrorCode::BladeFull, capacity_bytes));
        // Checked before the quota: no quota is larger than the blade, so a client that has all of
        // it would be told that its quota is too small.
        if count > self.capacity_superpages.saturating_sub(self.used_superpages) {
            return full;
        }
        let account = self.client(client)?;
        if account.used_superpages.saturating_add(count) > account.quota_superpages {
            let quota_bytes = u64::from(account.quota_superpages) * SUPERPAGE_BYTES;
            return Err(Refused::new(ErrorCode::QuotaExceeded, quota_bytes));
        }
        if let Some(grant) = account.grant {
            self.grants.check_quota(grant, count)?;
        }
        if count > segment.free_rmmas() { full } else { Ok(()) }
    }

    /// Frees the memory of superpages `first` to `first + count - 1`, which must all have some.
    ///
    /// # Errors
    /// Frozen, out of range, not allocated, or a write to the segment is under way.
    pub fn free(
        &mut self,
        client: ClientNumber,
        id: SegmentId,
        first: SuperpageNumber,
        count: u32,
    ) -> Result<Scrub<M>, Refused> {
        self.take_back(client, id, first, count, Segment::no_writers)
    }

    /// The same for superpages that no memory was found for, so that no write of them can be under
    /// way.
    ///
    /// # Errors
    /// Frozen, out of range or not allocated: the client has meanwhile ended, or has freed them.
    pub fn undo_allocate(
        &mut self,
        client: ClientNumber,
        id: SegmentId,
        first: SuperpageNumber,
        count: u32,
    ) -> Result<Scrub<M>, Refused> {
        self.take_back(client, id, first, count, |_| Ok(()))
    }

    fn take_back(
        &mut self,
        client: ClientNumber,
        id: SegmentId,
        first: SuperpageNumber,
        count: u32,
        check: impl FnOnce(&Segment<M>) -> Result<(), Refused>,
    ) -> Result<Scrub<M>, Refused> {
        let segment = self.segment_of_mut(client, id)?;
        segment.check_writable(id)?;
        segment.check_range(first, count)?;
        let range = first.0..first.0 + count;
        if let Some(sma) = range.clone().find(|sma| !segment.map.contains_key(sma)) {
            return Err(Refused::new(ErrorCode::NotAllocated, u64::from(sma)));
        }
        check(segment)?;
        let rmmas: Vec<u32> = range.filter_map(|sma| segment.map.remove(&sma)).collect();
        assert_eq!(count_u32(rmmas.len()), count, "as many are scrubbed as are freed");
        let memory = segment.memory.clone();
        self.charge(client, -i64::from(count));
        self.note(|| Row::Freed { segment: id.0, first: first.0, count });
        Ok(Scrub { memory, part: ScrubPart::Superpages { segment: id, rmmas } })
    }

    /// Makes the segment immutable, so that others can attach.
    ///
    /// # Errors
    /// Frozen already, or a write to it is under way.
    pub fn freeze(&mut self, client: ClientNumber, id: SegmentId) -> Result<(), Refused> {
        let segment = self.segment_of_mut(client, id)?;
        segment.check_writable(id)?;
        segment.no_writers()?;
        assert_eq!(segment.uses(), 1, "a writable segment has one use: its owner's");
        segment.frozen = true;
        self.note_segment(id);
        Ok(())
    }

    /// Makes the segment writable again for its only user, with its only use, unless
    /// `is_held_elsewhere` says that a former user (with an expired lease) could still read its
    /// memory.
    ///
    /// # Errors
    /// Not frozen, or in use elsewhere too.
    pub fn thaw(
        &mut self,
        client: ClientNumber,
        id: SegmentId,
        is_held_elsewhere: impl FnOnce(&M) -> bool,
    ) -> Result<(), Refused> {
        let segment = self.segment_of_mut(client, id)?;
        if !segment.frozen {
            return Err(Refused::new(ErrorCode::NotFrozen, id.0));
        }
        if segment.uses() != 1 {
            return Err(Refused::new(ErrorCode::InUse, segment.uses()));
        }
        if is_held_elsewhere(&segment.memory) {
            return Err(Refused::new(ErrorCode::InUse, segment.uses() + 1));
        }
        assert_eq!(segment.charged, client, "a segment is charged to its only user");
        segment.frozen = false;
        self.note_segment(id);
        Ok(())
    }

    /// Adds a use of the frozen segment that `token` opens.
    ///
    /// # Errors
    /// No such token, the segment was made under another grant, or it is not frozen.
    pub fn attach(
        &mut self,
        client: ClientNumber,
        token: SegmentToken,
    ) -> Result<SegmentView, Refused> {
        let grant = self.client(client)?.grant;
        let unknown = Refused::new(ErrorCode::UnknownSegment, 0);
        let id = *self.tokens.get(&token).ok_or(unknown)?;
        let segment = self.segments.get_mut(&id).filter(|segment| segment.grant == grant);
        let segment = segment.ok_or(unknown)?;
        if !segment.frozen {
            return Err(Refused::new(ErrorCode::NotFrozen, id.0));
        }
        assert!(!segment.users.is_empty(), "a segment exists as long as it has a user");
        let writers = segment.writers.load(Ordering::Acquire);
        assert_eq!(writers, 0, "nobody writes to what is frozen");
        *segment.users.entry(client).or_insert(0) += 1;
        if let Some(client) = self.clients.get_mut(&client) {
            client.segments.insert(id);
        }
        self.note_segment(id);
        self.view(client, id)
    }

    /// Ends one use of the segment. The last use of all drops the segment.
    ///
    /// # Errors
    /// Not a segment of this client.
    pub fn detach(
        &mut self,
        client: ClientNumber,
        id: SegmentId,
    ) -> Result<Option<Scrub<M>>, Refused> {
        let segment = self.segment_of_mut(client, id)?;
        match segment.users.get_mut(&client) {
            Some(uses) if *uses > 1 => {
                *uses -= 1;
                self.note_segment(id);
                Ok(None)
            }
            _ => Ok(self.drop_user(client, id)),
        }
    }

    /// Ends all uses of the segment by this client.
    pub(super) fn drop_user(&mut self, client: ClientNumber, id: SegmentId) -> Option<Scrub<M>> {
        if let Some(client) = self.clients.get_mut(&client) {
            client.segments.remove(&id);
        }
        let segment = self.segments.get_mut(&id)?;
        segment.users.remove(&client)?;
        let superpages = count_u32(segment.map.len());
        let heir = segment.users.keys().next().copied();
        if segment.charged == client {
            if let Some(heir) = heir {
                segment.charged = heir;
                self.charge(heir, i64::from(superpages));
            }
            self.charge(client, -i64::from(superpages));
        } else {
            let is_user = segment.users.contains_key(&segment.charged);
            assert!(is_user, "a segment is charged to one of its users");
        }
        if heir.is_some() {
            self.note_segment(id);
            return None;
        }
        let segment = self.segments.remove(&id)?;
        self.tokens.remove(&segment.token);
        self.note_segment(id);
        Some(Scrub { memory: segment.memory, part: ScrubPart::Whole { superpages } })
    }

    fn charge(&mut self, client: ClientNumber, superpages: i64) {
        let client = self.clients.get_mut(&client).expect("who is charged is a client");
        let used = i64::from(client.used_superpages) + superpages;
        let Ok(used) = u32::try_from(used) else {
            panic!("a client's account is off: {used} superpages");
        };
        client.used_superpages = used;
        if let Some(grant) = client.grant {
            self.grants.charge(grant, superpages);
        }
    }

    /// The segment, without its list.
    ///
    /// # Errors
    /// Not a segment of this client.
    pub fn view(&self, client: ClientNumber, id: SegmentId) -> Result<SegmentView, Refused> {
        let segment = self.segment_of(client, id)?;
        let state = if segment.frozen { SegmentState::Frozen } else { SegmentState::Writable };
        Ok(SegmentView {
            segment: id,
            span_superpages: segment.span_superpages,
            allocated_superpages: count_u32(segment.map.len()),
            state,
        })
    }

    /// Appends at most `limit` of the segment's superpages with memory, after the first `skip`.
    ///
    /// # Errors
    /// Not a segment of this client.
    pub fn list(
        &self,
        client: ClientNumber,
        id: SegmentId,
        skip: usize,
        limit: usize,
        pairs: &mut Vec<SuperpagePair>,
    ) -> Result<(), Refused> {
        let segment = self.segment_of(client, id)?;
        let pair = |(sma, rmma): (&u32, &u32)| {
            SuperpagePair::new(SuperpageNumber(*sma), SuperpageNumber(*rmma))
        };
        pairs.extend(segment.map.iter().skip(skip).take(limit).map(pair));
        Ok(())
    }

    /// Each segment's grant, its RMMA superpages, and its memory.
    pub fn holdings(
        &self,
    ) -> impl Iterator<Item = (Option<GrantId>, impl ExactSizeIterator<Item = u32>, &M)> {
        self.segments.values().map(|it| (it.grant, it.map.values().copied(), &it.memory))
    }

    /// The segment's memory, and whether this client may write all of it directly.
    ///
    /// # Errors
    /// Not a segment of this client.
    pub fn memory_of(&self, client: ClientNumber, id: SegmentId) -> Result<(M, bool), Refused> {
        let segment = self.segment_of(client, id)?;
        Ok((segment.memory.clone(), !segment.frozen))
    }
}
