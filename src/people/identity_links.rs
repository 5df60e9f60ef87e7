//! Putting a tenant's document of links in force: all of it or nothing, and nothing but what it changes.
//! Imports of a tenant run one after the other. People who are joined or parted by one are not told:
//! they did nothing, and whoever answers for the tenant did.

use std::collections::{BTreeSet, HashMap, HashSet};

use chrono::{DateTime, Utc};

use super::merge::{self, MergeRequest};
use super::unlink;
use crate::app::App;
use crate::audit;
use crate::domain::identity_links::document::{LinkDocument, LinkEntry};
use crate::domain::identity_links::plan::{Leaving, LinkAction, Plan, Target, plan};
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

/// As often as people may be joined and parted under us before we give up.
const ATTEMPTS: usize = 5;

/// What a document changed, or would.
#[derive(Debug)]
pub struct Imported {
    pub dm_scope: DmScope,
    /// What changed besides people: `dm_scope`, `toolsets`.
    pub settings: Vec<&'static str>,
    pub changes: Vec<ImportedChange>,
    pub warnings: Vec<FieldError>,
}

#[derive(Debug)]
pub struct ImportedChange {
    pub action: LinkAction,
    pub name: Option<String>,
    /// `None` for someone who would be made.
    pub user_id: Option<UserId>,
    pub identity: Option<IdentityName>,
    pub from_user_id: Option<UserId>,
}

/// Puts a document in force; a dry run only says what that would change.
pub async fn import(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    document: LinkDocument,
    dry_run: bool,
) -> Result<Imported> {
    let now = app.clock.now();
    tenants::lock(tx, tx.tenant_id()).await?;
    let (dm_scope, settings) = put_settings(tx, &document, dry_run, now).await?;
    let entries = document.links.as_deref();
    let plan = match entries {
        Some(entries) => settle(tx, entries).await?,
        None => Plan::default(),
    };
    let mut made = HashMap::new();
    let changes_something = !plan.is_empty() || !settings.is_empty();
    if changes_something && !dry_run {
        let mut doing = Doing {
            entries: entries.unwrap_or_default(),
            now,
            actor,
            made: HashMap::new(),
            audit: Vec::new(),
        };
        doing.everything(tx, &plan).await?;
        doing.audit.push(summary(tx, actor, &plan, &settings));
        for entry in doing.audit {
            audit::append(&app.keyring, tx, entry, now).await?;
        }
        made = doing.made;
    }
    let changes = plan.changes.into_iter().map(|change| ImportedChange {
        action: change.action,
        name: change.name,
        user_id: match change.user {
            Target::Known(id) => Some(id),
            Target::New(entry) => made.get(&entry).copied(),
        },
        identity: change.identity,
        from_user_id: change.from,
    });
    let mut warnings = document.warnings;
    warnings.extend(plan.warnings);
    Ok(Imported {
        dm_scope,
        settings,
        changes: changes.collect(),
        warnings,
    })
}

/// What the document says besides who is who, written where it differs from what is.
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
        let agent = agents::find_for_update(tx, DEFAULT_AGENT).await?;
        let gone = || Error::internal(anyhow::anyhow!("a tenant has no agent main"));
        let mut agent = agent.ok_or_else(gone)?;
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

/// What has to be done, with everyone held to whom it happens. Who is who is read again once they are:
/// they may have been joined or parted while we waited.
async fn settle(tx: &mut TenantTx, entries: &[LinkEntry]) -> Result<Plan> {
    let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    let accounts = entries.iter().flat_map(|entry| &entry.accounts);
    let accounts: Vec<&IdentityName> = accounts.map(|listed| &listed.name).collect();
    let mut held = BTreeSet::new();
    for _ in 0..ATTEMPTS {
        let people = imports::list_users_page(tx, &names, &accounts).await?;
        let plan = plan(entries, &people)?;
        let touched = plan.touched();
        if touched.iter().all(|id| held.contains(id)) {
            return Ok(plan);
        }
        users::lock(tx, &touched).await?;
        held.extend(touched);
    }
    Err(Error::unavailable(
        "the tenant's people",
        anyhow::anyhow!("the users are merged and unlinked repeatedly"),
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

/// A plan that is being carried out. Its audit is kept until every lock is held.
struct Doing<'a> {
    entries: &'a [LinkEntry],
    now: DateTime<Utc>,
    actor: &'a str,
    /// The people who were made, by the place of their entry.
    made: HashMap<usize, UserId>,
    audit: Vec<Entry>,
}

impl Doing<'_> {
    async fn everything(&mut self, tx: &mut TenantTx, plan: &Plan) -> Result<()> {
        let changes_places = !plan.leaving.is_empty() || !plan.merges.is_empty();
        if changes_places || !plan.linked.is_empty() {
            let touched = plan.touched();
            merges::lock_slots(tx, &touched).await?;
            merges::lock_conversations(tx, &touched).await?;
        }
        imports::delete_names(tx, &plan.unnamed).await?;
        let silent = self.part_silent(tx, plan).await?;
        for leaving in &plan.leaving {
            if alone(leaving).is_none_or(|account| !silent.contains(&account)) {
                self.part(tx, leaving).await?;
            }
        }
        self.create(tx, plan).await?;
        for (from, into) in &plan.merges {
            self.join(tx, *into, *from, MoveKind::Import).await?;
        }
        self.add(tx, plan).await?;
        imports::update_imported(tx, &plan.unlisted, false).await?;
        imports::update_imported(tx, &plan.listed, true).await
    }

    /// Of a large document that is taken back, most were never heard: those are parted all at once, and
    /// are in the audit with the number of them.
    async fn part_silent(&self, tx: &mut TenantTx, plan: &Plan) -> Result<HashSet<IdentityId>> {
        let alone: Vec<IdentityId> = plan.leaving.iter().filter_map(alone).collect();
        if alone.is_empty() {
            return Ok(HashSet::new());
        }
        let silent = unlinks::list_without_messages(tx, &alone).await?;
        imports::part_silent(tx, &silent, self.now, self.now + UNDO_WINDOW).await?;
        Ok(silent.into_iter().collect())
    }

    /// Gives accounts a person of their own, together, and joins that one with whoever lists them now.
    /// Someone who is to be made is simply that person.
    async fn part(&mut self, tx: &mut TenantTx, leaving: &Leaving) -> Result<()> {
        let mut own: Option<UserId> = None;
        for id in &leaving.accounts {
            let gone = || Error::internal(anyhow::anyhow!("an account of someone held is gone"));
            let account = identities::get(tx, *id).await?.ok_or_else(gone)?;
            let parting = unlink::part(tx, &account, self.now).await?.parting;
            self.audit.push(unlink::entry(self.actor, &parting));
            match own {
                None => own = Some(parting.to_user),
                Some(own) => self.join(tx, own, parting.to_user, MoveKind::Undo).await?,
            }
        }
        match (own, leaving.into) {
            (Some(own), Some(Target::Known(into))) => {
                self.join(tx, into, own, MoveKind::Import).await
            }
            (Some(own), Some(Target::New(entry))) => match self.made.get(&entry).copied() {
                Some(into) => self.join(tx, into, own, MoveKind::Import).await,
                None => {
                    self.made.insert(entry, own);
                    Ok(())
                }
            },
            (None, _) | (_, None) => Ok(()),
        }
    }

    async fn join(
        &mut self,
        tx: &mut TenantTx,
        into: UserId,
        from: UserId,
        kind: MoveKind,
    ) -> Result<()> {
        let held = users::lock(tx, &[into, from]).await?;
        let find = |id: UserId| held.iter().find(|user| user.id == id);
        let gone = || Error::internal(anyhow::anyhow!("someone who is held is gone"));
        let both = find(into).zip(find(from)).ok_or_else(gone)?;
        let moved = identities::list(tx, from).await?;
        let request = MergeRequest {
            into,
            from,
            kind,
            reason: None,
            by: None,
            dry_run: false,
        };
        merge::join(tx, &request, both, &moved, self.now).await?;
        self.audit.push(merge::entry(self.actor, into, from, kind));
        Ok(())
    }

    /// Makes those whom nobody is yet, and gives names.
    async fn create(&mut self, tx: &mut TenantTx, plan: &Plan) -> Result<()> {
        let mut names: Vec<(UserId, &str)> = Vec::new();
        let mut people = Vec::new();
        let linked: HashSet<&Target> = plan.linked.iter().collect();
        for place in &plan.created {
            let name = self.entries[*place].name.as_str();
            if let Some(id) = self.made.get(place) {
                names.push((*id, name));
                continue;
            }
            let id = UserId::generate();
            self.made.insert(*place, id);
            people.push(ImportedUser {
                id,
                name,
                linked: linked.contains(&Target::New(*place)),
            });
        }
        let named = plan.named.iter();
        names.extend(named.map(|(id, place)| (*id, self.entries[*place].name.as_str())));
        let mut free = true;
        if !people.is_empty() {
            free &= imports::insert_users(tx, &people, self.now).await?;
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

    /// Makes accounts. Whoever has several from now on shares one slot between them.
    async fn add(&mut self, tx: &mut TenantTx, plan: &Plan) -> Result<()> {
        if plan.additions.is_empty() {
            return Ok(());
        }
        let additions = plan.additions.iter();
        let accounts: Vec<(UserId, &IdentityName)> = additions
            .map(|addition| Ok((self.id_of(addition.into)?, &addition.name)))
            .collect::<Result<_>>()?;
        if !imports::insert_accounts(tx, &accounts, self.now).await? {
            return Err(overtaken("an account was first heard in this moment"));
        }
        let linked = plan.linked.iter().map(|target| self.id_of(*target));
        let linked = linked.collect::<Result<Vec<_>>>()?;
        for person in imports::update_shared(tx, &linked, self.now).await? {
            merge::fold(tx, person, self.now).await?;
        }
        Ok(())
    }

    fn id_of(&self, target: Target) -> Result<UserId> {
        let nobody = || Error::internal(anyhow::anyhow!("an entry has no person"));
        match target {
            Target::Known(id) => Ok(id),
            Target::New(entry) => self.made.get(&entry).copied().ok_or_else(nobody),
        }
    }
}

/// An account that leaves with no other, and joins nobody.
fn alone(leaving: &Leaving) -> Option<IdentityId> {
    match (leaving.accounts.as_slice(), leaving.into) {
        ([only], None) => Some(*only),
        (_, Some(_)) | (_, None) => None,
    }
}

/// The next try sees what was done meanwhile.
fn overtaken(why: &'static str) -> Error {
    Error::unavailable("the tenant's people", anyhow::anyhow!(why))
}
