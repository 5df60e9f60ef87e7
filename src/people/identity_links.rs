//! Applies a tenant's document of identity links: all of it or nothing, and only what it changes. Imports of a
//! tenant run one after the other. Merged and unlinked users get no notice: the tenant acted, not they.

use std::collections::{BTreeSet, HashMap, HashSet};

use chrono::{DateTime, Utc};

use super::merge::{self, MergeRequest};
use super::unlink;
use crate::app::App;
use crate::audit;
use crate::domain::identity_links::document::{LinkDocument, LinkEntry};
use crate::domain::identity_links::plan::{GroupUnlink, LinkAction, Plan, Target, plan};
use crate::domain::identity_links::{MoveKind, UNDO_WINDOW};
use crate::domain::people::identity::IdentityName;
use crate::domain::tenant::agent::{DEFAULT_AGENT, DmScope};
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::error::{Error, FieldError, Result};
use crate::ids::{IdentityId, UserId};
use crate::store::TenantTx;
use crate::store::identity_links::imports::{self, ImportedUser};
use crate::store::identity_links::{merges, unlinks};
use crate::store::people::{identities, users};
use crate::store::tenant::{agents, tenants};

/// How often the users may be merged and unlinked at the same time before the request fails.
const ATTEMPTS: usize = 5;

/// What a document changed, or would change.
#[derive(Debug)]
pub struct LinkImportResult {
    pub dm_scope: DmScope,
    /// The changed settings: `dm_scope`, `toolsets`.
    pub settings: Vec<&'static str>,
    pub changes: Vec<LinkImportChange>,
    pub warnings: Vec<FieldError>,
}

#[derive(Debug)]
pub struct LinkImportChange {
    pub action: LinkAction,
    pub name: Option<String>,
    /// `None` for a user whom a dry run would create.
    pub user_id: Option<UserId>,
    pub identity: Option<IdentityName>,
    pub from_user_id: Option<UserId>,
}

/// Applies a document; a dry run only reports the changes.
pub async fn import(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    document: LinkDocument,
    dry_run: bool,
) -> Result<LinkImportResult> {
    let now = app.clock.now();
    tenants::lock(tx, tx.tenant_id()).await?;
    let (dm_scope, settings) = put_settings(tx, &document, dry_run, now).await?;
    let entries = document.links.as_deref();
    let plan = match entries {
        Some(entries) => lock_and_plan(tx, entries).await?,
        None => Plan::default(),
    };
    let mut created = HashMap::new();
    let changes_something = !plan.is_empty() || !settings.is_empty();
    if changes_something && !dry_run {
        let mut applying = Applying {
            entries: entries.unwrap_or_default(),
            now,
            actor,
            created: HashMap::new(),
            audit: Vec::new(),
        };
        applying.apply(tx, &plan).await?;
        applying.audit.push(summary(tx, actor, &plan, &settings));
        for entry in applying.audit {
            audit::append(&app.keyring, tx, entry, now).await?;
        }
        created = applying.created;
    }
    let changes = plan.changes.into_iter().map(|change| LinkImportChange {
        action: change.action,
        name: change.name,
        user_id: match change.user {
            Target::Existing(id) => Some(id),
            Target::New(entry) => created.get(&entry).copied(),
        },
        identity: change.identity,
        from_user_id: change.from,
    });
    let mut warnings = document.warnings;
    warnings.extend(plan.warnings);
    Ok(LinkImportResult {
        dm_scope,
        settings,
        changes: changes.collect(),
        warnings,
    })
}

/// Writes the settings of the document that differ from the stored ones.
async fn put_settings(
    tx: &mut TenantTx,
    document: &LinkDocument,
    dry_run: bool,
    now: DateTime<Utc>,
) -> Result<(DmScope, Vec<&'static str>)> {
    let mut changed = Vec::new();
    let mut own = tenants::get_own(tx).await?;
    let dm_scope = document.dm_scope.unwrap_or(own.settings.dm_scope);
    if dm_scope != own.settings.dm_scope {
        changed.push("dm_scope");
        own.settings.dm_scope = dm_scope;
        if !dry_run {
            tenants::update_settings(tx, &own, now).await?;
        }
    }
    if let Some(toolsets) = &document.toolsets {
        let agent = agents::lock(tx, DEFAULT_AGENT).await?;
        let mut agent =
            agent.ok_or_else(|| Error::internal(anyhow::anyhow!("a tenant has no agent main")))?;
        if agent.spec.toolsets != *toolsets {
            changed.push("toolsets");
            agent.spec.toolsets = toolsets.clone();
            if !dry_run {
                let sealed = agent.api_key_enc.as_deref();
                agents::upsert(tx, DEFAULT_AGENT, &agent.spec, sealed, now).await?;
            }
        }
    }
    Ok((dm_scope, changed))
}

/// Plans the changes and locks every user they touch. The links are read again after each lock: a merge or an
/// unlink may have committed while this transaction waited.
async fn lock_and_plan(tx: &mut TenantTx, entries: &[LinkEntry]) -> Result<Plan> {
    let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    let listed = entries.iter().flat_map(|entry| &entry.identities);
    let identities: Vec<&IdentityName> = listed.map(|listed| &listed.name).collect();
    let mut locked = BTreeSet::new();
    for _ in 0..ATTEMPTS {
        let users = imports::list_users(tx, &names, &identities).await?;
        let plan = plan(entries, &users)?;
        let touched = plan.touched();
        if touched.iter().all(|id| locked.contains(id)) {
            return Ok(plan);
        }
        users::lock(tx, &touched).await?;
        locked.extend(touched);
    }
    Err(Error::unavailable(
        "the tenant's users",
        anyhow::anyhow!("they are being merged and unlinked again and again"),
    ))
}

fn summary(tx: &TenantTx, actor: &str, plan: &Plan, settings: &[&'static str]) -> Entry {
    let count = |action: LinkAction| {
        let changes = plan.changes.iter();
        changes.filter(|change| change.action == action).count() as i64
    };
    let detail = Detail::default()
        .count("created", count(LinkAction::CreateUser))
        .count("named", count(LinkAction::NameUser))
        .count("unnamed", count(LinkAction::UnnameUser))
        .count("added", count(LinkAction::Add))
        .count("merged", count(LinkAction::Merge))
        .count("removed", count(LinkAction::Remove))
        .words("settings", settings.iter().copied());
    Entry::new(actor, Action::IdentityLinksPut, &tx.tenant_id()).with(detail)
}

/// A plan that is being applied. Its audit entries wait until every lock is held.
struct Applying<'a> {
    entries: &'a [LinkEntry],
    now: DateTime<Utc>,
    actor: &'a str,
    /// The users that were created, by the index of their entry.
    created: HashMap<usize, UserId>,
    audit: Vec<Entry>,
}

impl Applying<'_> {
    async fn apply(&mut self, tx: &mut TenantTx, plan: &Plan) -> Result<()> {
        let moves_users = !plan.leaving.is_empty() || !plan.merges.is_empty();
        if moves_users || !plan.linked.is_empty() {
            let touched = plan.touched();
            merges::lock_slots(tx, &touched).await?;
            merges::lock_conversations(tx, &touched).await?;
        }
        imports::delete_names(tx, &plan.unnamed).await?;
        let silent = self.unlink_silent(tx, plan).await?;
        for leaving in &plan.leaving {
            if alone(leaving).is_none_or(|identity| !silent.contains(&identity)) {
                self.unlink(tx, leaving).await?;
            }
        }
        self.create(tx, plan).await?;
        for (from, into) in &plan.merges {
            self.merge(tx, *into, *from, MoveKind::Import).await?;
        }
        self.add(tx, plan).await?;
        imports::update_imported(tx, &plan.unlisted, false).await?;
        imports::update_imported(tx, &plan.listed, true).await
    }

    /// When a large document is replaced, most of the removed identities never sent a message. Those are unlinked
    /// all at once, and the audit has only their number.
    async fn unlink_silent(&self, tx: &mut TenantTx, plan: &Plan) -> Result<HashSet<IdentityId>> {
        let alone: Vec<IdentityId> = plan.leaving.iter().filter_map(alone).collect();
        if alone.is_empty() {
            return Ok(HashSet::new());
        }
        let silent = unlinks::list_without_messages(tx, &alone).await?;
        imports::unlink_unused(tx, &silent, self.now, self.now + UNDO_WINDOW).await?;
        Ok(silent.into_iter().collect())
    }

    /// Moves identities to a user of their own, together, and merges that user into the one who lists them now.
    /// If that one is still to be created, the new user takes its place.
    async fn unlink(&mut self, tx: &mut TenantTx, leaving: &GroupUnlink) -> Result<()> {
        let mut own: Option<UserId> = None;
        for id in &leaving.identities {
            let identity = identities::get(tx, *id).await?.ok_or_else(|| {
                Error::internal(anyhow::anyhow!("an identity of a locked user is gone"))
            })?;
            let unlink = unlink::detach(tx, &identity, self.now).await?.unlink;
            self.audit.push(unlink::entry(self.actor, &unlink));
            match own {
                None => own = Some(unlink.to_user),
                Some(own) => self.merge(tx, own, unlink.to_user, MoveKind::Undo).await?,
            }
        }
        match (own, leaving.into) {
            (Some(own), Some(Target::Existing(into))) => {
                self.merge(tx, into, own, MoveKind::Import).await
            }
            (Some(own), Some(Target::New(entry))) => match self.created.get(&entry).copied() {
                Some(into) => self.merge(tx, into, own, MoveKind::Import).await,
                None => {
                    self.created.insert(entry, own);
                    Ok(())
                }
            },
            (None, _) | (_, None) => Ok(()),
        }
    }

    async fn merge(
        &mut self,
        tx: &mut TenantTx,
        into: UserId,
        from: UserId,
        kind: MoveKind,
    ) -> Result<()> {
        let locked = users::lock(tx, &[into, from]).await?;
        let find = |id: UserId| locked.iter().find(|user| user.id == id);
        let both = find(into)
            .zip(find(from))
            .ok_or_else(|| Error::internal(anyhow::anyhow!("a locked user is gone")))?;
        let moved = identities::list(tx, from).await?;
        let request = MergeRequest {
            into,
            from,
            kind,
            reason: None,
            by: None,
            dry_run: false,
        };
        merge::merge_users(tx, &request, both, &moved, self.now).await?;
        self.audit.push(merge::entry(self.actor, into, from, kind));
        Ok(())
    }

    /// Creates the users who do not exist yet, and sets names.
    async fn create(&mut self, tx: &mut TenantTx, plan: &Plan) -> Result<()> {
        let mut names: Vec<(UserId, &str)> = Vec::new();
        let mut users = Vec::new();
        let linked: HashSet<&Target> = plan.linked.iter().collect();
        for index in &plan.created {
            let name = self.entries[*index].name.as_str();
            if let Some(id) = self.created.get(index) {
                names.push((*id, name));
                continue;
            }
            let id = UserId::generate();
            self.created.insert(*index, id);
            users.push(ImportedUser {
                id,
                name,
                linked: linked.contains(&Target::New(*index)),
            });
        }
        let named = plan.named.iter();
        names.extend(named.map(|(id, index)| (*id, self.entries[*index].name.as_str())));
        let mut free = true;
        if !users.is_empty() {
            free &= imports::insert_users(tx, &users, self.now).await?;
        }
        if free && !names.is_empty() {
            free &= imports::update_names(tx, &names).await?;
        }
        if free {
            Ok(())
        } else {
            Err(overtaken(
                "a name was given to another user at the same time",
            ))
        }
    }

    /// Creates identities. A user who has several from now on shares one slot between them.
    async fn add(&mut self, tx: &mut TenantTx, plan: &Plan) -> Result<()> {
        if plan.additions.is_empty() {
            return Ok(());
        }
        let additions = plan.additions.iter();
        let identities: Vec<(UserId, &IdentityName)> = additions
            .map(|addition| Ok((self.id_of(addition.into)?, &addition.name)))
            .collect::<Result<_>>()?;
        if !imports::insert_identities(tx, &identities, self.now).await? {
            return Err(overtaken("an identity first appeared at the same time"));
        }
        let linked = plan.linked.iter().map(|target| self.id_of(*target));
        let linked = linked.collect::<Result<Vec<_>>>()?;
        for user_id in imports::update_shared(tx, &linked, self.now).await? {
            merge::fold(tx, user_id, self.now).await?;
        }
        Ok(())
    }

    fn id_of(&self, target: Target) -> Result<UserId> {
        match target {
            Target::Existing(id) => Ok(id),
            Target::New(entry) => self
                .created
                .get(&entry)
                .copied()
                .ok_or_else(|| Error::internal(anyhow::anyhow!("an entry has no user"))),
        }
    }
}

/// An identity that leaves alone and joins no other user.
fn alone(leaving: &GroupUnlink) -> Option<IdentityId> {
    match (leaving.identities.as_slice(), leaving.into) {
        ([only], None) => Some(*only),
        (_, Some(_)) | (_, None) => None,
    }
}

/// A retry sees the concurrent change.
fn overtaken(why: &'static str) -> Error {
    Error::unavailable("the tenant's users", anyhow::anyhow!(why))
}
